"""Calls of a model's modules, run alone: the parts of which the units of a model without a graph are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, tree_map, unflatten
from partita._torch.tensors.detached_copy import detached_leaf_copy
from partita._torch.tensors.storage import storage_key
from partita.pipelining.frontends.modules.recording import fresh_leaf
from partita.pipelining.frontends.modules.twin import twin_of
from partita.pipelining.measuring.unit_run import UnitRun

__all__ = ["CallRun", "call_runs"]

_NUMBERS = frozenset({"idx", "index", "layer_id", "layer_idx", "layer_index", "layer_number"})
"""Attributes that number equal blocks."""


@dataclass(frozen=True)
class CallRun:
    """A call of a module in a pass.

    Attributes:
        inputs: for each leaf of its arguments a name of the memory that it lies in.
        outputs: for each leaf of its result the same.
        run: how to run it again, or a call that is equal to it.
        own_s: seconds that it took in the pass.
        before_s: seconds between the call before, or the beginning of the pass, and this one.
        after_s: seconds from the end of the call to the end of the pass; 0.0 where another one follows.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: UnitRun
    own_s: float
    before_s: float
    after_s: float = 0.0


def call_runs(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    wanted: Collection[tuple[str, int]],
    *,
    training: bool,
) -> dict[tuple[str, int], CallRun]:
    """Run a copy of ``model`` on the example once, and take down these calls of its modules.

    The copy has gradients and hooks of its own, and copies of all tensors but the parameters. Its modules are
    what is run again, with the arguments that they were called with.

    Args:
        wanted: qualified name of a module, and the number of the call.
    """
    twin = twin_of(model, {})
    calls = _Calls(wanted)
    handles = []
    for path in {path for path, _ in wanted}:
        module = twin.get_submodule(path)
        handles += [
            module.register_forward_pre_hook(calls.entered(path), with_kwargs=True),
            module.register_forward_hook(calls.left(path), with_kwargs=True),
        ]
    own_args, own_kwargs = tree_map(fresh_leaf, (tuple(args), dict(kwargs)))
    if training != twin.training:
        twin.train(training)
    with torch.enable_grad():
        calls.begin()
        twin(*own_args, **own_kwargs)
        calls.end()
    for handle in handles:
        handle.remove()
    return calls.finished


class _Calls:
    """Takes down calls while a pass runs; keeps their values alive, so that memory has one name each."""

    def __init__(self, wanted: Collection[tuple[str, int]]) -> None:
        self.finished: dict[tuple[str, int], CallRun] = {}
        self._wanted = set(wanted)
        self._counts: dict[str, int] = {}
        self._open: list[_Open] = []
        self._runs: dict[Any, UnitRun] = {}
        self._alive: list[Any] = []
        self._last: tuple[str, int] | None = None
        self._free_since = 0.0

    def begin(self) -> None:
        """Start the clock of what runs before the first call."""
        self._free_since = time.perf_counter()

    def end(self) -> None:
        """The pass has ended."""
        seconds = time.perf_counter() - self._free_since
        if self._last is not None:
            self.finished[self._last] = replace(self.finished[self._last], after_s=seconds)

    def entered(self, path: str) -> Callable[..., None]:
        """A hook for the beginning of a call."""

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            before_s = time.perf_counter() - self._free_since
            number = self._counts.get(path, 0)
            self._counts[path] = number + 1
            leaves, spec = flatten((args, kwargs))
            self._alive += leaves
            # What is not asked for may lie within a transform of torch.func, whose tensors can't be copied.
            copies = [detached_leaf_copy(leaf) for leaf in leaves] if (path, number) in self._wanted else []
            # Its inputs are what it is given now: the call may put more into a container, such as a cache.
            names = _names(leaves) if copies else ()
            self._open.append(_Open((path, number), names, copies, spec, before_s, time.perf_counter()))

        return hook

    def left(self, path: str) -> Callable[..., None]:
        """A hook for the end of a call."""

        def hook(module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
            now = time.perf_counter()
            place, inputs, leaves, spec, before_s, started = self._open.pop()
            if place not in self._wanted:
                return
            outputs = flatten(result)[0]
            self._alive += outputs
            key = (_kind_of_module(module), str(spec), tuple(map(_kind, leaves)))
            run = self._runs.setdefault(key, _run(path, module, leaves, spec))
            own_s = now - started
            self.finished[place] = CallRun(inputs, _names(outputs), run, own_s, before_s)
            self._last, self._free_since = place, time.perf_counter()

        return hook


class _Open(NamedTuple):
    """A call that has begun, with its arguments as they were then, as leaves and a structure."""

    place: tuple[str, int]
    inputs: tuple[str, ...]
    leaves: list[Any]
    spec: Any
    before_s: float
    started: float


def _run(path: str, module: nn.Module, leaves: Sequence[Any], spec: Any) -> UnitRun:
    def call(*own: Any) -> Sequence[Any]:
        args, kwargs = unflatten(list(own), spec)
        return flatten(module(*args, **kwargs))[0]

    # within torch.func.functional_call other tensors are in their places, which accumulate no gradient
    parameters = tuple(parameter for parameter in module.parameters() if parameter.is_leaf)
    return UnitRun(path, call, tuple(leaves), parameters, frozenset(range(len(leaves))))


def _names(leaves: Sequence[Any]) -> tuple[str, ...]:
    return tuple(
        str(storage_key(leaf)) if isinstance(leaf, Tensor) else f"{number} of another kind"
        for number, leaf in enumerate(leaves)
    )


def _kind(leaf: Any) -> Any:
    """What of an argument decides how long a call takes."""
    if isinstance(leaf, Tensor):
        return (type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else id(leaf)


def _kind_of_module(module: nn.Module) -> Any:
    """What of a module decides how long its calls take: classes, settings, parameters and buffers."""
    state = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in tensors
    ]
    settings = [
        (path, type(inner), inner.training, inner.extra_repr(), _settings(inner))
        for path, inner in module.named_modules()
    ]
    return (tuple(state), tuple(settings))


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Numbers, words and switches on a module, but what numbers it among its like."""
    kinds = (bool, int, float, str, type(None), torch.dtype)
    return tuple(
        (name, repr(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _NUMBERS and isinstance(value, kinds)
    )
