"""Reduces gradients bucket by bucket while the backward pass still runs.

Two things tell it of gradients. In eager mode autograd adds each to ``parameter.grad`` and calls a hook. A
compiled backward graph offers them earlier, between its pieces, when autograd has not seen them yet::

    autograd      |---------------- one node: the compiled backward ----------------|  add to grad
    pieces        | layer 3       | layer 2        | layer 1          |                    hooks
    buckets             offer 3 -> [== reduce ==]
                                       offer 2 -> [=== reduce ===]

An offer is taken only where it is certain to be the whole gradient: nobody else contributes to it in this
pass, and nobody else has hooks on it. In all other cases the gradient goes through autograd, and the hook
sends it later: never wrong, only less overlap.

All ranks reduce all buckets, in one order, in each synchronised pass, whatever they used. So ranks can't lose
step, and no rank waits for a bucket that another one does not send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from partita._torch.autograd.running_pass import (
    accumulator,
    at_end_of_pass,
    current_pass,
    inside_another_pass,
    will_reach,
)
from partita._torch.tensors.parameters import has_hooks
from partita.ddp.buckets.bucket_layout import BucketLayout
from partita.ddp.buckets.bucket_report import PassTimes, record_spans
from partita.ddp.buckets.bucket_set import BucketSet
from partita.ddp.buckets.settings import ReducerSettings
from partita.ddp.reducing.agreement import GraphFingerprint
from partita.ddp.reducing.arrivals import GradientArrivals
from partita.ddp.reducing.compiled_runs import CompiledRuns
from partita.ddp.reducing.consensus import Consensus
from partita.ddp.reducing.gradient import Arrival, ParameterGradient
from partita.ddp.reducing.gradient_hooks import hooks_on
from partita.ddp.reducing.next_pass import NextPass
from partita.ddp.reducing.pass_errors import (
    failed_everywhere,
    raised_on_some,
    refuse_compiled_autograd,
    unfinished_pass,
)
from partita.ddp.reducing.pass_state import PassState
from partita.errors import ExecutionError
from partita.planning import BucketPlan
from partita.runtime import NULL_TRACER, Comm, Recorder
from partita.runtime.failures.thread_activity import doing

__all__ = ["Reducer"]

_WARM_UP_PASSES = 2


class Reducer:
    """Reduces the gradients of one replicated module.

    Args:
        names: of the trainable parameters.
        parameters: themselves, in the same order.
        sparse: the names of those whose gradients are sparse.

    Attributes:
        last: when the buckets of the last synchronised pass were ready, sent and reduced.
        measuring: compiled graphs are cut after each gradient.
        samples: when each gradient was ready, for each synchronised pass while `measuring`.
        pass_ended: is called after each synchronised pass, on all ranks alike.
        beside: is called when all buckets have been sent, on all ranks alike; what it returns is called when
            they have been reduced.
        paused: backward passes reduce nothing meanwhile.
        next_pass: is told of forward passes with gradients.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        comm: Comm,
        settings: ReducerSettings,
        tracer: Recorder = NULL_TRACER,
        *,
        sparse: Collection[str] = (),
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.comm = comm
        self.last: PassTimes | None = None
        self.measuring = False
        self.samples: list[Mapping[str, float]] = []
        self.pass_ended: Callable[[Reducer], None] | None = None
        self.beside: Callable[[], Callable[[], None]] | None = None
        self.paused = False
        self.next_pass = NextPass()
        self._plan = settings.plan
        self._tracer = tracer
        self._consensus = Consensus(comm, len(self.parameters), check_graphs=settings.check_graphs)
        self._buckets = BucketSet(self.names, self.parameters, self._consensus.order, settings, sparse)
        self._runs = CompiledRuns(self.parameters)
        self._gradients = [
            ParameterGradient(name, parameter, late=name in settings.late)
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]
        self._arrivals = GradientArrivals(
            self._gradients, comm, buckets=self._buckets, consensus=self._consensus, hook=settings.hook
        )
        self._unread: torch.Tensor | None = None  # flags of the last pass that the host has not waited for
        self._pass: PassState | None = None
        self._reentrant = False
        self._lock = threading.RLock()
        self._accumulators = [accumulator(parameter) for parameter in self.parameters]
        self._detached = False
        self._handles = hooks_on(self._accumulators, self)

    def detach(self) -> None:
        """Take the hooks off the parameters; what is still to come of a backward pass stays on its rank."""
        self._detached = True
        for handle in self._handles:
            handle.remove()

    # --- the buckets

    @property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """In the order in which they are sent."""
        return self._buckets.layouts

    @property
    def bucket_of(self) -> Sequence[int]:
        """The number of its bucket, for each parameter."""
        return self._buckets.bucket_of

    @property
    def version(self) -> int:
        """Counts changes of where backward graphs are to be cut."""
        return self._buckets.version

    @property
    def is_steady(self) -> bool:
        """Whether gradients come as they will from now on: in the first passes, some go through autograd."""
        return self._consensus.step > _WARM_UP_PASSES

    def measure(self, *, on: bool) -> None:
        """Note when each gradient is ready, from the next pass on; compiled graphs are cut after each."""
        self.measuring = on
        if on:
            self.samples = []
        self._buckets.version += 1

    def use_plan(self, plan: BucketPlan) -> None:
        """Put the gradients into other buckets from the next pass on. The same on every rank.

        Raises:
            PlanError: a plan for other parameters.
            ExecutionError: a backward pass is under way.
        """
        if self._pass is not None:
            raise ExecutionError("the buckets can't change while a backward pass runs: change them after it")
        self._buckets.lay_out(self._consensus.order, plan)
        self._plan = plan

    def compare_weights(
        self, times_written: Callable[[], int], check: Callable[[], None], warn: Callable[[int], bool]
    ) -> None:
        """Call ``check`` in the first pass where ``times_written`` is not the same on all ranks, and ``warn``
        in later ones where samples of the weights differ; see `Consensus`.
        """
        self._consensus.times_written, self._consensus.check_weights = times_written, check
        self._consensus.warn_of_drift = warn

    # --- called by the forward pass

    def finish_last_pass(self) -> None:
        """Drop a pass that raised, where it raised on all ranks, before anything else is sent.

        Raises:
            ExecutionError: it raised on some ranks only; on every rank. Or no exception has ended it, and it
                has not come to its end.
        """
        with self._lock:
            if self._pass is not None:
                self._drop(self._pass)
            if self._unread is not None:
                flags, self._unread = self._unread, None
                self._check_outcome(flags, None, raised=False)

    def add_node(self, node: Any) -> None:
        """Note that a compiled graph has run, whose backward pass is ``node``."""
        self._runs.add(node)

    def indices_after(self, node: Any) -> list[int | None]:
        """Return, for each tensor that ``node`` hands a gradient to, the index of the parameter."""
        return self._runs.indices_after(node)

    # --- called by the backward pass

    def add_graph(self, graph: GraphFingerprint) -> None:
        """Note that a backward graph has been compiled."""
        self._consensus.add_graph(graph)

    def begin(self, indices: Iterable[int], order: Sequence[int] = ()) -> bool:
        """Note that a compiled graph of the backward pass runs. Cheap where the pass has begun.

        Args:
            indices: the parameters that it has gradients for.
            order: in which order the first gradients will get ready, by index.

        Returns:
            Whether the pass fills ``grad`` of any of them. That of ``torch.autograd.grad`` does not, and
            nothing of it is reduced.
        """
        if torch.compiler.is_dynamo_compiling():
            refuse_compiled_autograd()
        if (
            self._detached
            or self.paused
            or not any(will_reach(self._accumulators[index]) for index in indices)
        ):
            return False
        with self._lock:
            self._enter(order)
        return True

    def offer(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Give the reducer a gradient before autograd has it.

        Returns:
            What is left for autograd to add to ``grad``: None where the reducer has taken it.
        """
        with self._lock:
            state = self._enter()
            left = self._arrivals.offered(state, index, gradient)
            self._end_if_nested(state)
            return left

    def accumulates(self, index: int) -> None:
        """Note that autograd is about to add to ``grad`` of a parameter, and to call hooks of the user's."""
        self._arrivals.accumulates(index)

    def accumulated(self, index: int) -> None:
        """Note that autograd is done with ``grad`` of a parameter: it has added a gradient, or had none to.

        Raises:
            ExecutionError: the gradient is sparse, or its bucket has been sent.
        """
        if self.paused:
            return
        with self._lock:
            state = self._enter()
            self._arrivals.accumulated(state, index)
            self._end_if_nested(state)

    # --- one backward pass, from its first task to its end

    def _enter(self, order: Sequence[int] = ()) -> PassState:
        """The state of the pass that this thread runs; begins it where it is new."""
        # 1. A task that has been here belongs to the pass that runs.
        task = current_pass()
        state = self._pass
        if state is not None and task in state.tasks:
            return state

        # 2. A new outermost task is a new pass; one that has not ended before has raised.
        nested = inside_another_pass()
        if state is not None and not nested and state.root is not None:
            self._drop(state)
            state = None
        if state is None:
            arrivals = [Arrival() for _ in self._gradients]
            state = self._pass = PassState(self.next_pass.synced, arrivals, time.monotonic())
            self._reentrant = self._reentrant or nested
            try:
                self._begin(state, order)
            except BaseException:
                self._pass = None
                raise

        # 3. The outermost task ends the pass; one within it (a reentrant checkpoint) may bring any gradient.
        state.tasks.add(task)
        if nested:
            self._reentrant = True
            for arrival in state.arrivals:
                arrival.expected = True
        else:
            state.root = task
            at_end_of_pass(self._finish)
        return state

    def _begin(self, state: PassState, order: Sequence[int]) -> None:
        self.next_pass.begins()
        if not state.sync:
            return

        # 1. All ranks agree on the order of gradients, and so on the buckets.
        with doing("backward of a replicated module"):
            is_new = self._consensus.exchange(order)
        if is_new:
            self._buckets.lay_out(self._consensus.order, self._plan)

        # 2. Which gradients will come in this pass, and which of them compiled graphs may hand over early.
        to_come = self._runs.offers_to_come()
        for index, (gradient, arrival) in enumerate(zip(self._gradients, state.arrivals, strict=True)):
            reached = will_reach(self._accumulators[index])
            arrival.expected = self._reentrant or reached or gradient.came
            arrival.to_come = to_come.get(index)
            if arrival.to_come is not None:
                arrival.early = reached and gradient.whole and not has_hooks(gradient.parameter)
        self._arrivals.pass_begins(state)

    def _end_if_nested(self, state: PassState) -> None:
        """Tasks within other tasks do not say which is the last: the pass is over when all is sent; where
        nothing is to be sent, each gradient is a pass.
        """
        is_complete = not state.sync or self._arrivals.is_complete(state)
        if self._reentrant and state.root is None and is_complete:
            self._finish()

    def _finish(self) -> None:
        """End the pass: all gradients are there."""
        with self._lock:
            state = self._pass
            if state is None:
                return
            try:
                self._arrivals.check_parameters(state)
                if state.sync:
                    with doing("backward of a replicated module"):
                        self._reduce_rest(state)
            finally:
                self._pass = None
            if state.sync and self.pass_ended is not None:
                self.pass_ended(self)

    def _reduce_rest(self, state: PassState) -> None:
        # 1. Send the buckets that are left, and wait for all.
        self._arrivals.take_partial(state)
        backward_end_s = time.monotonic()
        self._arrivals.send_rest(state)
        flags = self._wait(state)

        # 2. Hand the means back, if the pass went well on all ranks.
        if flags.is_cpu:
            self._check_outcome(flags, state, raised=False)
        else:
            self._unread = flags  # reading them now would keep the host waiting for the device
        for reduction in state.reductions:
            reduction.hand_back()
        self._arrivals.pass_ends(state)

        # 3. When was what? For the table, the planner and the trace.
        self.last = PassTimes.of(
            state.reductions, state.ready_s(), self.names, state.started_s, backward_end_s
        )
        if self.measuring and self.is_steady:
            self.samples.append(self.last.ready_s)
        record_spans(self._tracer, state.reductions)

    def _wait(self, state: PassState) -> torch.Tensor:
        """Wait until all buckets are reduced, and return the flags of all ranks."""
        rest = None if self.beside is None else self.beside()
        for reduction in state.reductions:
            reduction.wait()
        if rest is not None:
            rest()
        flags = state.reductions[-1].flagged()
        self._consensus.pass_ends(flags)
        return flags

    def _drop(self, state: PassState) -> None:
        """Send what others wait for of a pass that raised, and forget it."""
        if state.sync and state.root is None:
            missing = [
                name for name, arrival in zip(self.names, state.arrivals, strict=True) if not arrival.is_there
            ]
            raise failed_everywhere(self.comm, unfinished_pass(missing), "the backward pass before")
        self._pass = None
        if state.sync:
            self._arrivals.send_rest(state, raised=True)
            flags = self._wait(state)
            self._arrivals.pass_is_dropped(state)
            self._check_outcome(flags, None, raised=True)

    def _check_outcome(self, flags: torch.Tensor, state: PassState | None, *, raised: bool) -> None:
        """Raise, on every rank, where the pass raised on some ranks and went well on others.

        Args:
            state: of the pass, where its gradients have not been handed back.
        """
        _, on_some, well_on_some, *_ = flags.tolist()
        if on_some and well_on_some:
            if state is not None:
                self._arrivals.pass_is_dropped(state)
            raise ExecutionError(raised_on_some(self.comm.all_gather_object(raised)))
