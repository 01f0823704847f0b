"""Auditing a model: which modules FSDP manages, ignores on purpose, or has missed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Set
from dataclasses import dataclass

from torch import nn

from partita._torch.distributed.fsdp_marks import (
    fsdp_wrapped_name,
    ignored_by_wrappers,
    is_border,
    is_wrapper,
    mark_of,
)
from partita.errors import CaptureError
from partita.listing import listed

__all__ = ["Audit", "audit"]


@dataclass(frozen=True)
class Audit:
    """The modules of a model by name, without FSDP1's own wrappers.

    Attributes:
        managed: marked for Dynamo.
        ignored: ignored on purpose, with everything inside them.
        missed: inside a managed module, but neither managed nor ignored; for example, added after wrapping.
        outside: not inside any managed module.
        eager: managed with ``use_orig_params=False``: torch.compile runs them eagerly.
    """

    managed: tuple[str, ...]
    ignored: tuple[str, ...]
    missed: tuple[str, ...]
    outside: tuple[str, ...]
    eager: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missed and nothing runs eagerly."""
        return not (self.missed or self.eager)

    def check(self) -> None:
        """Raise an error unless `ok`.

        Raises:
            CaptureError: names the modules, and says what to do.
        """
        if not self.ok:
            raise CaptureError(str(self))

    def __str__(self) -> str:
        lines = [
            f"{len(self.managed)} managed, {len(self.ignored)} ignored, {len(self.missed)} missed, "
            f"{len(self.outside)} outside"
        ]
        if self.missed:
            lines.append(
                f"missed: {listed(self.missed)}: added after wrapping? FSDP neither shards them nor tells "
                "Dynamo. Add them before wrapping, or name them in ignored_modules (or ignored_params, as "
                "fully_shard was given them)"
            )
        if self.eager:
            lines.append(
                f"eager: {listed(self.eager)}: wrapped with use_orig_params=False, so torch.compile makes no "
                "graph of them. Wrap with use_orig_params=True, or use fully_shard"
            )
        return "\n".join(lines)


def audit(
    module: nn.Module,
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
) -> Audit:
    """Return which modules of a model FSDP manages.

    Args:
        ignored_modules: those that are ignored on purpose, besides the ones that FSDP1's wrappers ignore.
        ignored_params: what ``fully_shard`` was given under that name: it leaves out the modules that have no
            buffers and no other parameters.

    Warns:
        UserWarning: some are wrapped with ``use_orig_params=False``; torch itself runs them eagerly without a
            warning.

    >>> from torch import nn
    >>> from partita.fsdp import annotate_modules_for_dynamo
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> annotate_modules_for_dynamo(model, (), use_orig_params=True)
    >>> model.append(nn.ReLU())[0].training
    True
    >>> audit(model).missed
    ('1',)
    """
    ignored = {inner for outer in ignored_modules for inner in outer.modules()}
    ignored.update(ignored_by_wrappers(module))
    if ignored_params:
        _add_all_ignored(module, set(ignored_params), ignored)
    lists: dict[str, list[str]] = {"managed": [], "ignored": [], "missed": [], "outside": [], "eager": []}
    inside: set[nn.Module] = set()
    for name, inner in module.named_modules():
        marked = mark_of(inner)
        if marked is not None or is_border(inner):
            inside.update(inner.modules())
        if is_wrapper(inner):
            continue
        if marked is False:
            lists["eager"].append(fsdp_wrapped_name(name))
        if inner in ignored:
            kind = "ignored"  # even where a nested wrapper has marked it
        elif marked is not None:
            kind = "managed"
        else:
            kind = "missed" if inner in inside else "outside"
        lists[kind].append(fsdp_wrapped_name(name))
    outcome = Audit(**{kind: tuple(names) for kind, names in lists.items()})
    if outcome.eager:
        warnings.warn(str(outcome), UserWarning, stacklevel=2)
    return outcome


def _add_all_ignored(module: nn.Module, ignored_params: Set[nn.Parameter], ignored: set[nn.Module]) -> bool:
    """Add the modules in which ``fully_shard`` has nothing to shard. Return whether this is one of them."""
    children = [_add_all_ignored(child, ignored_params, ignored) for child in module.children()]
    parameters = set(module.parameters(recurse=False))
    has_state = any(True for _ in module.buffers(recurse=False)) or not parameters <= ignored_params
    if has_state or not all(children):
        return False
    ignored.add(module)
    return True
