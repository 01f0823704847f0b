"""Which modules FSDP manages, which it was told to ignore, and which it has missed."""

from __future__ import annotations

import warnings
from collections.abc import Collection
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
    """The modules of a tree by name, each in one list. FSDP1's own wrappers are left out of names and lists.

    Attributes:
        managed: marked for Dynamo.
        ignored: left out on purpose, with everything inside them.
        missed: inside of a managed module, but neither managed nor ignored: added after wrapping, for
            example.
        outside: not inside of any managed module.
        eager: managed with ``use_orig_params=False``: torch.compile runs them eagerly.
    """

    managed: tuple[str, ...]
    ignored: tuple[str, ...]
    missed: tuple[str, ...]
    outside: tuple[str, ...]
    eager: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing is missed, and nothing runs eagerly."""
        return not (self.missed or self.eager)

    def check(self) -> None:
        """Raise where something is wrong.

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
                "Dynamo. Add them before wrapping, or name them in ignored_modules"
            )
        if self.eager:
            lines.append(
                f"eager: {listed(self.eager)}: wrapped with use_orig_params=False, so torch.compile makes no "
                "graph of them. Wrap with use_orig_params=True, or use fully_shard"
            )
        return "\n".join(lines)


def audit(module: nn.Module, ignored_modules: Collection[nn.Module] = ()) -> Audit:
    """Look at every module of a tree once.

    Args:
        ignored_modules: those that were ignored on purpose, besides the ones that FSDP1's wrappers know of.

    Warns:
        UserWarning: some are wrapped with ``use_orig_params=False``; torch itself runs them eagerly without
            a word.

    >>> from torch import nn
    >>> from partita.fsdp import annotate_modules_for_dynamo
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> annotate_modules_for_dynamo(model, (), use_orig_params=True)
    >>> model.append(nn.ReLU())[0].training
    True
    >>> audit(model).missed
    ('1',)
    """
    ignored = {inner for outer in ignored_modules for inner in outer.modules()} | set(
        ignored_by_wrappers(module)
    )
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
            kind = "ignored"  # also where a nested wrapper, which was not told, has marked it
        elif marked is not None:
            kind = "managed"
        else:
            kind = "missed" if inner in inside else "outside"
        lists[kind].append(fsdp_wrapped_name(name))
    found = Audit(**{kind: tuple(names) for kind, names in lists.items()})
    if found.eager:
        warnings.warn(str(found), UserWarning, stacklevel=2)
    return found
