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
from partita.pipelining.checkpoints.replicas import StateEntry

__all__ = [
    "Names",
    "Restore",
    "names_of",
    "optimizer_entries",
    "prepare_optimizer",
    "state_places",
]

Restore = Callable[[], None]
"""Puts into an optimizer what was read for it."""

Names = Mapping[int, tuple[str, ...]]
"""All names of each parameter, by the ``id`` of the tensor."""

_NOT_SETTINGS = ("params", "param_names")


def optimizer_entries(optimizers: Sequence[Optimizer], names: Names, section: str) -> list[StateEntry]:
    """All that the optimizers know, one entry a value and name, in that section of a checkpoint.

    Raises:
        CheckpointError: a parameter that no stage has, or a state that is neither tensor nor plain value.
    """
    entries = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
            for parameter in group["params"]:
                found = names_of(parameter, names)
                for kind, values in (
                    ("state", optimizer.state.get(parameter, {})),
                    ("param_groups", settings),
                ):
                    for key, value in values.items():
                        _check_plain(found[0], key, value)
                        root = f"{kind}.{min(found)}.{key}"
                        entries += [
                            StateEntry(section, f"{kind}.{name}.{key}", value, root) for name in found
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
    """For each wanted parameter the keys of a checkpoint that are about it.

    Args:
        keys: of one kind, without its prefix: ``layers.0.weight.exp_avg``.
        wanted: names of parameters.

    Returns:
        By parameter, then by what it is (``exp_avg``): the key.

    >>> state_places(["a.b.step", "a.b.exp_avg", "c.step"], ["a.b"])
    {'a.b': {'step': 'a.b.step', 'exp_avg': 'a.b.exp_avg'}}
    """
    known = set(wanted)
    places: dict[str, dict[str, str]] = {}
    for key in keys:
        name, _, what = key.rpartition(".")
        while name and name not in known:
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
) -> Restore:
    """What puts loaded values into an optimizer, through its own ``load_state_dict``. Changes nothing yet.

    Args:
        names: of its parameters.
        states: by parameter name, what the checkpoint has for it.
        settings: likewise the learning rate and so on.

    Raises:
        CheckpointError: parameters of one group that were trained with different settings.
    """
    packed = optimizer.state_dict()
    positions: dict[int, int] = {}
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        found = [names_of(parameter, names) for parameter in group["params"]]
        packed_group |= _common([known[0] for known in found], [_any(settings, known) for known in found])
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
                _keep_dtypes(optimizer.state.get(parameter, {}), _any(states, names[id(parameter)]))

    return restore


def _keep_dtypes(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """torch casts state to the parameter's dtype when it loads. State of higher precision stays as it was."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.dtype != state[key].dtype:
            state[key] = value.to(state[key].device)


def _any(values: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> Mapping[str, Any]:
    return next((values[name] for name in names if name in values), {})


def _common(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all parameters of a group were trained with."""
    known = [(name, found) for name, found in zip(names, settings, strict=True) if found]
    if not known:
        return {}
    first, common = known[0]
    for name, found in known:
        for key in common.keys() | found.keys():
            if not _equal(common.get(key), found.get(key)):
                raise CheckpointError(
                    f"{first!r} and {name!r} are in one param group, but the checkpoint has {key} = "
                    f"{common.get(key)!r} for one and {found.get(key)!r} for the other: give each its own "
                    f"param group (the group holds {listed(names)})"
                )
    return dict(common)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
