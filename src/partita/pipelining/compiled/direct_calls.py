"""Calls of a stage's compiled function that go straight to its compiled graphs.

A call of what ``torch.compile`` returned is watched: which argument was which input of the graph, and which
result which output. Later calls that Dynamo's guards would let through go there without it (`DirectGraph`)::

    Dynamo's guards ── AOTAutograd's wrappers ── autograd function ── forward graph     a first call
    the same guards ────────────────────────── autograd function ── forward graph     from then on

What a frame is needed for (aliases, subclasses, symbolic sizes, ...) keeps it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.compile.direct_graph import CallGuard, DirectGraph, Readiness
from partita._torch.compile.eager_stance import default_stance
from partita.pipelining.compiled.ahead import ahead_now

__all__ = ["DirectCalls", "note_call"]

_CONSTANTS = (int, float, bool, str, type(None))
"""Types of results that follow from what the guards compare: a graph computes tensors."""

_MOST_WAYS = 8
"""As many kinds of calls as Dynamo compiles a function for by default, before it gives up."""


@dataclass(frozen=True, eq=False)
class _Way:
    """One kind of calls.

    Attributes:
        guard: holds for them.
        graph: what they go to.
        inputs: positions of its inputs among the arguments.
        results: where each result comes from: the arguments, the graph's outputs, and `constants`, in a row.
        constants: results that the graph does not compute, such as a size.
        single: whether the function returns one value, not several.
    """

    guard: CallGuard
    graph: DirectGraph
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    constants: tuple[Any, ...]
    single: bool

    def run(self, values: Sequence[Any]) -> Any:
        sources = (*values, *self.graph.run([values[place] for place in self.inputs]), *self.constants)
        if self.single:
            return sources[self.results[0]]
        return tuple([sources[place] for place in self.results])


class DirectCalls:
    """A compiled function, to be called with tensors and constants.

    Args:
        run: what ``torch.compile`` returned.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._ways: list[_Way] = []
        self._watches = True

    def __call__(self, *values: Any, **by_name: Any) -> Any:
        """The function's result."""
        if by_name or ahead_now() is not None or not default_stance():  # a graph runs nothing ahead of a step
            return self._run(*values, **by_name)
        for way in self._ways:
            if way.guard.holds(values):
                return way.run(values)
        return self._watched(values) if self._watches else self._run(*values)

    def _watched(self, values: tuple[Any, ...]) -> Any:
        guard = CallGuard(values)
        before, _seen.calls = _seen.calls, []
        try:
            result = self._run(*values)
            calls = _seen.calls
        finally:
            _seen.calls = before
        way = _way(guard, calls, values, result)
        if isinstance(way, _Way):
            self._ways.append(way)
        self._watches = way != "never" and len(self._ways) < _MOST_WAYS
        return result


@dataclass(frozen=True, eq=False)
class _Call:
    graph: DirectGraph
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class _Seen(threading.local):
    calls: list[_Call] | None = None


_seen = _Seen()


def note_call(graph: DirectGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Tell who watches this thread that a graph has been called, by Dynamo."""
    if _seen.calls is not None:
        _seen.calls.append(_Call(graph, tuple(inputs), tuple(outputs)))


def _way(
    guard: CallGuard, calls: Sequence[_Call] | None, values: Sequence[Any], result: Any
) -> _Way | Readiness:
    """How calls like the one that has just been go from now on, or when that is known."""
    single = isinstance(result, torch.Tensor)
    if not calls or len(calls) != 1 or not (single or type(result) in (tuple, list)):
        return "never"
    (call,) = calls
    outcome = (result,) if single else result
    sources = (*values, *call.outputs)
    place_of = {id(value): place for place, value in reversed([*enumerate(sources)])}
    constants = [value for value in outcome if type(value) in _CONSTANTS]
    place_of |= {id(value): len(sources) + place for place, value in enumerate(constants)}
    inputs = [place_of.get(id(value), len(sources)) for value in call.inputs]
    complete = all(place < len(values) for place in inputs) and all(
        id(value) in place_of for value in outcome
    )
    if not complete or not guard.holds(values):  # the call may have left another state
        return "never"
    readiness = call.graph.readiness(call.inputs, call.outputs)
    if readiness != "ready":
        return readiness
    results = tuple([place_of[id(value)] for value in outcome])
    return _Way(guard, call.graph, tuple(inputs), results, tuple(constants), single)
