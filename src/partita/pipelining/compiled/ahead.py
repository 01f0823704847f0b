"""Stages are compiled before the first step's actions: all ranks at once.

A stage is compiled when it is first called, and in a pipeline it is called when its input arrives. So the
ranks would compile one after the other, each waiting for the one before it::

    as inputs arrive    rank 0  [F..]                [I W..]        ahead    rank 0  [F.. I W..] step
                        rank 1       [F..][I W..]                            rank 1  [F.. I W..] step

Ahead of a step each stage is called with values of the shapes that it will be given. The compiler does its
work, and what it has made stops where it would begin to compute (`CompiledAhead`): nothing has run, no state
has changed. Then the backward graph is compiled for what the schedule will ask of it. Where a guess is wrong
(a value lies in memory in another way, the loss does not depend on an output), what is needed is compiled
when it first runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from partita._torch.compile.eager_stance import when_traced
from partita.pipelining.compiled.backward_runner import BackwardRunner

__all__ = ["AheadOfStep", "CompiledAhead", "ahead_now", "compiling_ahead"]


class CompiledAhead(BaseException):
    """In place of a result: what was called is compiled now."""


@dataclass
class AheadOfStep:
    """What a stage will be asked for.

    Attributes:
        whole: whether any backward pass is whole (B).
        halves: whether any is in halves (I, then W).
        missing: for each output that depends on what is trained whether no gradient arrives for it; None:
            one does, and if there are several such outputs, nobody knows for which.
        early_state: the numbers of the arguments that are state, and whose gradients I computes too.
        early_inputs: set when the forward graph is compiled, None before: the positions of its inputs that I
            computes gradients of.
        runners: likewise, of the backward graphs.
        computes: whether there is anything to compile.
    """

    whole: bool = False
    halves: bool = False
    missing: tuple[bool, ...] | None = None
    early_state: frozenset[int] = frozenset()
    early_inputs: frozenset[int] | None = None
    runners: list[BackwardRunner] = field(default_factory=list)
    computes: bool = True

    def compile_backward(self) -> None:
        """Compile the backward graphs."""
        early_inputs = self.early_inputs or ()
        with torch.no_grad():  # as autograd runs them
            for runner in self.runners:
                runner.compile(early_inputs, self.missing or (False,), whole=self.whole, halves=self.halves)

    def stop_without_graph(self) -> None:
        """Raise `CompiledAhead` where there is nothing to compute, and so nothing that would."""
        if self.early_inputs is None:
            self.computes = False
            raise CompiledAhead


class _Now(threading.local):
    step: AheadOfStep | None = None


_now = _Now()


def ahead_now() -> AheadOfStep | None:
    """What this thread compiles ahead of; None while it runs what it calls."""
    return _now.step


@contextmanager
def compiling_ahead(step: AheadOfStep) -> Iterator[None]:
    """Only compile what is called in a block: the block ends at the first call."""
    _now.step = step
    try:
        with suppress(CompiledAhead), when_traced(step.stop_without_graph):
            yield
    finally:
        _now.step = None
