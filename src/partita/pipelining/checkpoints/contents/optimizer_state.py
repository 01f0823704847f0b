"""Optimizer state under the names of parameters, so that it finds its parameter again in any cut.

The keys are those of torch's own flattened layout (``get_optimizer_state_dict`` with
``flatten_optimizer_state_dict=True``), which has no param groups that would depend on the cut::

    state.<parameter>.<exp_avg, step, ...>        param_groups.<parameter>.<lr, betas, ...>

Beside it stand values that an optimizer keeps for all of its parameters together, once for each of them, and
the tensors of a container, or of a tensor that wraps others::

    shared_state.<parameter>.<k>                  state.<parameter>.<GG>.<container, 0, 1, ...>

The nested layout, where ``param_groups`` is a list, is read too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita._torch.containers.pytree import flatten_registered, unflatten
from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.replicas import StateEntry
from partita.pipelining.checkpoints.contents.wrapped_tensors import as_dicts, as_tensors
from partita.pipelining.checkpoints.files.plain_values import plain_bytes, plain_value

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

_NESTED = (Tensor, Mapping, list, tuple)

_STANDS_FOR = "partita.tensor"
"""In the place of a container's tensor stands a dict of this and the tensor's key."""


def optimizer_entries(
    optimizers: Sequence[Optimizer], names: Names, section: str, *, allow_pickle: bool
) -> list[StateEntry]:
    """The state and the settings of optimizers, one entry for each value and name.

    Raises:
        CheckpointError: a parameter that no stage has, or a container of what is no plain data.
    """
    entries = []
    for optimizer in optimizers:
        shared = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
            for parameter in group["params"]:
                aliases = names_of(parameter, names)
                for kind, values in (
                    ("state", optimizer.state.get(parameter, {})),
                    ("param_groups", settings),
                    ("shared_state", shared),
                ):
                    for key, value in _all_apart(values, aliases[0], allow_pickle=allow_pickle):
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


def _all_apart(values: Mapping[Any, Any], name: str, *, allow_pickle: bool) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        what = f"the optimizer's {key!r} of {name!r}"
        yield from _apart(key, value, what, allow_pickle=allow_pickle)


def _apart(key: str, value: Any, what: str, *, allow_pickle: bool) -> Iterator[tuple[str, Any]]:
    """The value under its key. A container is bytes, with its tensors beside it.

    >>> [key for key, _ in _apart("GG", [torch.ones(1), []], "GG", allow_pickle=False)]
    ['GG.container', 'GG.0']
    """
    value = as_dicts(value, what)
    is_simple = isinstance(value, (list, tuple)) and not any(isinstance(it, _NESTED) for it in value)
    if not isinstance(value, (Mapping, list, tuple)) or is_simple:
        yield key, value
        return
    leaves, spec = flatten_registered(value, _is_tensor)
    tensors = {f"{key}.{place}": leaf for place, leaf in enumerate(leaves) if _is_tensor(leaf)}
    names = iter(tensors)
    places = [{_STANDS_FOR: next(names)} if _is_tensor(leaf) else leaf for leaf in leaves]
    yield f"{key}.container", plain_bytes(unflatten(places, spec), what, allow_pickle=allow_pickle)
    yield from tensors.items()


def _together(values: Mapping[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
    """The values that `_apart` took apart."""
    whole = dict(values)
    for key, value in values.items():
        if isinstance(value, bytes) and key.endswith(".container"):
            container = plain_value(BytesIO(whole.pop(key)), repr(key), allow_pickle=allow_pickle)
            leaves, spec = flatten_registered(container, _is_place)
            leaves = [whole.pop(leaf[_STANDS_FOR]) if _is_place(leaf) else leaf for leaf in leaves]
            name = key.removesuffix(".container")
            whole[name] = as_tensors(unflatten(leaves, spec), f"the optimizer's {name!r}")
    return whole


def _is_place(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_STANDS_FOR}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


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
    shared: Mapping[str, Mapping[str, Any]],
    dtypes: Mapping[int, torch.dtype | None],
    *,
    allow_pickle: bool,
) -> Restore:
    """A function that loads values into an optimizer, through its own ``load_state_dict``.

    Args:
        names: those of its parameters.
        states: what the checkpoint has for each parameter, by name.
        settings: the learning rate and so on of each parameter, by name.
        shared: what its optimizer had for all of its parameters, by name.
        dtypes: that each parameter was saved with, by its ``id``.
        allow_pickle: unpickle what containers have beside plain data.

    Raises:
        CheckpointError: parameters of one group that were trained with different settings.
    """
    states, settings, shared = (
        {name: _together(values, allow_pickle=allow_pickle) for name, values in kind.items()}
        for kind in (states, settings, shared)
    )
    packed = optimizer.state_dict()
    positions: dict[int, int] = {}
    every = [names_of(parameter, names) for group in optimizer.param_groups for parameter in group["params"]]
    of_all = [_any(shared, aliases) for aliases in every]
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        group_names = [names_of(parameter, names) for parameter in group["params"]]
        packed_group |= _common(
            [aliases[0] for aliases in group_names],
            [_any(settings, aliases) for aliases in group_names],
            "param group",
        )
        for parameter, position in zip(group["params"], packed_group["params"], strict=True):
            positions[id(parameter)] = position
    packed["state"] = {
        position: dict(state)
        for identity, position in positions.items()
        if (state := _any(states, names[identity]))
    } | _common([aliases[0] for aliases in every], of_all, "optimizer")

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
        leaves, spec = flatten_registered(value, _is_tensor)
        loaded, _ = flatten_registered(state[key], _is_tensor)
        for place, leaf in enumerate(leaves):
            if parameter.dtype != saved_dtype and isinstance(leaf, Tensor) and leaf.dtype == saved_dtype:
                continue
            if isinstance(leaf, Tensor) and leaf.dtype != loaded[place].dtype:
                loaded[place] = leaf.to(loaded[place].device)
                state[key] = unflatten(loaded, spec)


def _any(values: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> Mapping[str, Any]:
    return next((values[name] for name in names if name in values), {})


def _common(
    names: Sequence[str], settings: Sequence[Mapping[str, Any]], where: Literal["param group", "optimizer"]
) -> dict[str, Any]:
    """The settings that all parameters of a group, or an optimizer, have in common."""
    saved = [(name, values) for name, values in zip(names, settings, strict=True) if values]
    if not saved:
        return {}
    first, common = saved[0]
    for name, values in saved:
        for key in common.keys() | values.keys():
            if not _equal(common.get(key), values.get(key)):
                raise CheckpointError(
                    f"{first!r} and {name!r} are in one {where}, but the checkpoint has {key} = "
                    f"{common.get(key)!r} for one and {values.get(key)!r} for the other: give each its own "
                    f"{where} (this one holds {listed(names)})"
                )
    return dict(common)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    leaves, spec = flatten_registered(left, _is_tensor)
    others, other_spec = flatten_registered(right, _is_tensor)
    if isinstance(left, (list, tuple, dict)):
        return spec == other_spec and all(map(_equal, leaves, others))
    return type(left) is type(right) and bool(left == right)
