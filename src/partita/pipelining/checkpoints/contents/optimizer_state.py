"""Optimizer state under the names of parameters, so that it finds its parameter again in any cut.

The keys are those of torch's own flattened layout (``get_optimizer_state_dict`` with
``flatten_optimizer_state_dict=True``), which has no param groups that would depend on the cut::

    state.<parameter>.<exp_avg, step, ...>        param_groups.<parameter>.<lr, betas, ...>

The nested layout, where ``param_groups`` is a list, is read too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.replicas import StateEntry

__all__ = [
    "Names",
    "Restore",
    "names_of",
    "optimizer_entries",
    "prepare_optimizer",
    "state_places",
]

Restore = Callable[[], None]
"""Loads into an optimizer what was read for it."""

Names = Mapping[int, tuple[str, ...]]
"""All names of each parameter, by the ``id`` of the tensor."""

_NOT_SETTINGS = ("params", "param_names")


def optimizer_entries(optimizers: Sequence[Optimizer], names: Names, section: str) -> list[StateEntry]:
    """The state and the settings of optimizers, one entry for each value and name.

    Raises:
        CheckpointError: a parameter that no stage has, or a state that is neither tensor nor plain value.
    """
    entries = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
            for parameter in group["params"]:
                aliases = names_of(parameter, names)
                for kind, values in (
                    ("state", optimizer.state.get(parameter, {})),
                    ("param_groups", settings),
                ):
                    for key, value in values.items():
                        _check_plain(aliases[0], key, value)
                        root = f"{kind}.{min(aliases)}.{key}"
                        entries += [
                            StateEntry(section, f"{kind}.{name}.{key}", value, root) for name in aliases
                        ]
    return entries


def names_of(parameter: Tensor, names: Names) -> tuple[str, ...]:
    """All names of an optimizer's parameter.

    Raises:
        CheckpointError: no stage has it.
    """
    if id(parameter) not in names:
        raise CheckpointError(
            f"an optimizer has a parameter of shape {list(parameter.shape)} that none of the given stages "
            "holds: pass all stages that it trains, and make it after the stages have been moved or "
            "materialised"
        )
    return names[id(parameter)]


def _check_plain(name: str, key: str, value: Any) -> None:
    nested = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    if any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in nested):
        raise CheckpointError(
            f"the optimizer's {key!r} of {name!r} is a {type(value).__name__} of tensors or containers, "
            "which has no name in a checkpoint: use an optimizer that keeps tensors and plain values for "
            "each parameter"
        )


def state_places(keys: Iterable[str], wanted: Iterable[str]) -> dict[str, dict[str, str]]:
    """The keys of a checkpoint that belong to each parameter.

    Args:
        keys: without the prefix of their kind: ``layers.0.weight.exp_avg``.
        wanted: the names of the parameters.

    Returns:
        The key, by the parameter's name and then by the value's (``exp_avg``).

    >>> state_places(["a.b.step", "a.b.exp_avg", "c.step"], ["a.b"])
    {'a.b': {'step': 'a.b.step', 'exp_avg': 'a.b.exp_avg'}}
    """
    parameters = set(wanted)
    places: dict[str, dict[str, str]] = {}
    for key in keys:
        name, _, what = key.rpartition(".")
        while name and name not in parameters:
            name, _, atom = name.rpartition(".")
            what = f"{atom}.{what}"
        if name:
            places.setdefault(name, {})[what] = key
    return places


def prepare_optimizer(
    optimizer: Optimizer,
    names: Names,
    states: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    dtypes: Mapping[int, torch.dtype | None],
) -> Restore:
    """A function that loads values into an optimizer, through its own ``load_state_dict``.

    Args:
        names: those of its parameters.
        states: what the checkpoint has for each parameter, by name.
        settings: the learning rate and so on of each parameter, by name.
        dtypes: that each parameter was saved with, by its ``id``.

    Raises:
        CheckpointError: parameters of one group that were trained with different settings.
    """
    packed = optimizer.state_dict()
    positions: dict[int, int] = {}
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        group_names = [names_of(parameter, names) for parameter in group["params"]]
        packed_group |= _common(
            [aliases[0] for aliases in group_names], [_any(settings, aliases) for aliases in group_names]
        )
        for parameter, position in zip(group["params"], packed_group["params"], strict=True):
            positions[id(parameter)] = position
    packed["state"] = {
        position: dict(state)
        for identity, position in positions.items()
        if (state := _any(states, names[identity]))
    }

    def restore() -> None:
        optimizer.load_state_dict(packed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                saved = _any(states, names[id(parameter)])
                _keep_dtypes(optimizer.state.get(parameter, {}), saved, parameter, dtypes[id(parameter)])

    return restore


def _keep_dtypes(
    state: dict[str, Any], saved: Mapping[str, Any], parameter: Tensor, saved_dtype: torch.dtype | None
) -> None:
    """Undo torch's cast of loaded state to the parameter's dtype, but where that is another one than it was
    saved with: what had the parameter's dtype has it again.
    """
    for key, value in saved.items():
        if parameter.dtype != saved_dtype and isinstance(value, Tensor) and value.dtype == saved_dtype:
            continue
        if isinstance(value, Tensor) and value.dtype != state[key].dtype:
            state[key] = value.to(state[key].device)


def _any(values: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> Mapping[str, Any]:
    return next((values[name] for name in names if name in values), {})


def _common(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all parameters of a group have in common."""
    saved = [(name, values) for name, values in zip(names, settings, strict=True) if values]
    if not saved:
        return {}
    first, common = saved[0]
    for name, values in saved:
        for key in common.keys() | values.keys():
            if not _equal(common.get(key), values.get(key)):
                raise CheckpointError(
                    f"{first!r} and {name!r} are in one param group, but the checkpoint has {key} = "
                    f"{common.get(key)!r} for one and {values.get(key)!r} for the other: give each its own "
                    f"param group (the group holds {listed(names)})"
                )
    return dict(common)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
