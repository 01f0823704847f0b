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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch

from partita._torch.backward_pass import (
    accumulator,
    at_end_of_pass,
    current_pass,
    fills_grad,
    grad_version,
    has_foreign_hooks,
    inside_another_pass,
    leaves_after,
    will_reach,
)
from partita.ddp.agreement import GraphPrint, Proposal, agree
from partita.ddp.hooks import CommHook
from partita.ddp.layout import BucketLayout, lay_out
from partita.ddp.listing import BucketTimes, PassTimes
from partita.ddp.reduction import BucketMemory, Reduction
from partita.errors import ExecutionError
from partita.planning import BucketPlan
from partita.runtime import NULL_TRACER, Comm, Recorder

__all__ = ["Reducer", "ReducerSettings"]


@dataclass(frozen=True)
class ReducerSettings:
    """How gradients are put into buckets and reduced; see `partita.ddp.replicate`."""

    cap_bytes: int
    first_cap_bytes: int
    plan: BucketPlan | None = None
    hook: CommHook | None = None
    check_graphs: bool = True
    late: frozenset[str] = frozenset()


@dataclass
class _Pass:
    """One backward pass over all of its tasks (a reentrant checkpoint runs tasks within tasks)."""

    sync: bool
    started_s: float = 0.0
    tasks: set[int] = field(default_factory=set)
    root: int | None = None
    expected: list[bool] = field(default_factory=list)
    early: set[int] = field(default_factory=set)
    remaining: dict[int, int] = field(default_factory=dict)
    partial: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)
    reductions: list[Reduction] = field(default_factory=list)


class Reducer:
    """The gradients of one replicated module.

    Args:
        names: of the trainable parameters.
        parameters: themselves, in the same order.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        comm: Comm,
        settings: ReducerSettings,
        tracer: Recorder = NULL_TRACER,
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.comm = comm
        self.settings = settings
        self.tracer = tracer
        self.buckets: tuple[BucketLayout, ...] = ()
        self.bucket_of: list[int] = []
        self.version = 0
        """Counts changes of the buckets."""
        self.last: PassTimes | None = None
        """When the buckets of the last synchronised pass were ready, sent and reduced."""
        self.measuring = False
        self.samples: list[Mapping[str, float]] = []
        """When each gradient was ready, for each synchronised pass while `measuring`."""
        self.step = 0
        self._graphs: dict[GraphPrint, None] = {}
        self._agreed: set[GraphPrint] = set()
        self._news: torch.Tensor | None = None
        self._observed: dict[int, None] = {}
        self._order = tuple(reversed(range(len(self.parameters))))
        self._armed = True
        self._passed_since_forward = True
        self._pass: _Pass | None = None
        self._touched = [False] * len(self.parameters)
        self._used_before = [True] * len(self.parameters)
        self._reentrant = False
        self._trusted = [False] * len(self.parameters)
        self._handed: dict[int, torch.Tensor] = {}
        self._nodes: list[ref[Any]] = []
        self._lock = threading.RLock()
        self._memory: list[BucketMemory] = []
        self._lay_out(settings.plan)
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._accumulators = [accumulator(parameter) for parameter in self.parameters]
        me = ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_accumulated, me, index))
            for index, parameter in enumerate(self.parameters)
        ]

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    # What the forward pass says.

    def forward_begins(self, *, sync: bool) -> None:
        """A forward pass with gradients begins; ``sync``: its gradients are to be reduced.

        Raises:
            ExecutionError: the backward pass before has not come to its end.
        """
        if self._pass is not None:
            raise self._failed(self._unfinished(), "the backward pass before")
        if self._passed_since_forward:
            self._armed, self._passed_since_forward = sync, False
        else:
            self._armed = self._armed or sync

    def add_node(self, node: Any) -> None:
        """A compiled graph has run; ``node`` will compute its backward pass."""
        self._nodes = [known for known in self._nodes if known() is not None]
        self._nodes.append(ref(node))

    def indices_after(self, node: Any) -> list[int | None]:
        """For each tensor that ``node`` hands a gradient to, the index of the parameter."""
        return [None if leaf is None else self._index.get(id(leaf)) for leaf in leaves_after(node)]

    # What the backward pass says.

    def add_graph(self, graph: GraphPrint) -> None:
        """A backward graph has been compiled."""
        self._graphs[graph] = None

    def begin(self, order: Sequence[int] = ()) -> bool:
        """Something of the backward pass runs. Cheap where that is known.

        Args:
            order: in which order the first gradients will get ready, by index.

        Returns:
            Whether the pass fills ``grad`` at all: that of ``torch.autograd.grad`` does not, and is none of
            the reducer's.
        """
        if not fills_grad(self._accumulators[0]):
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
            parameter = self.parameters[index]
            if not state.sync or not _is_ordinary(gradient, parameter):
                return self._decline(state, index, gradient)
            self._observed.setdefault(index)
            if index not in state.early:
                return self._decline(state, index, gradient)
            before = state.partial.pop(index, None)
            if before is not None:
                gradient = before if gradient is None else before + gradient
            state.remaining[index] -= 1
            if state.remaining[index] > 0:
                if gradient is not None:
                    state.partial[index] = gradient
                return None
            if gradient is not None:
                self._take(state, index, gradient)
            return None

    def accumulated(self, index: int) -> None:
        """Autograd is done with ``grad`` of a parameter: it has added a gradient, or had none to add."""
        with self._lock:
            state = self._enter()
            parameter = self.parameters[index]
            handed = self._handed.pop(index, None)
            if (
                parameter.grad is not None
                and handed is not None
                and self.names[index] not in self.settings.late
            ):
                self._trusted[index] = torch.equal(parameter.grad, handed)
            if not state.sync:
                self._touched[index] = self._touched[index] or parameter.grad is not None
                return
            if index in state.gradients and grad_version(parameter) == state.versions[index]:
                return  # all of it was offered before
            if parameter.grad is None:
                state.expected[index] = False
                self._launch_complete(state)
                return
            if parameter.grad.layout is not torch.strided:
                raise self._failed(_sparse(self.names[index]), "backward")
            if len(state.reductions) > self.bucket_of[index]:
                raise self._failed(_too_late(self.names[index]), "backward")
            self._touched[index] = True
            for taken in (state.partial.pop(index, None), state.gradients.get(index)):
                if taken is not None:
                    parameter.grad.add_(taken)
            self._observed.setdefault(index)
            self._ready(state, index, None)

    # Inside.

    def _decline(self, state: _Pass, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Leave a gradient, and what was taken of it before, to autograd."""
        state.early.discard(index)
        before = state.partial.pop(index, None)
        if before is not None:
            gradient = before if gradient is None else before + gradient
        elif gradient is not None and index in state.remaining and self.parameters[index].grad is None:
            known = self._handed.get(index)
            self._handed[index] = gradient if known is None else known + gradient
        return gradient

    def _take(self, state: _Pass, index: int, gradient: torch.Tensor) -> None:
        parameter = self.parameters[index]
        self._touched[index] = True
        if parameter.grad is None:
            self._ready(state, index, gradient)
            return
        with torch.no_grad():
            parameter.grad.add_(gradient)
        self._ready(state, index, None)

    def _ready(self, state: _Pass, index: int, gradient: torch.Tensor | None) -> None:
        state.gradients[index] = gradient
        state.versions[index] = grad_version(self.parameters[index])
        state.ready_s[index] = time.monotonic()
        self._launch_complete(state)

    def _launch_complete(self, state: _Pass, *, flush: bool = False) -> None:
        while len(state.reductions) < len(self.buckets):
            layout = self.buckets[len(state.reductions)]
            if not flush and any(
                state.expected[slot.index] and slot.index not in state.gradients for slot in layout.slots
            ):
                return
            gradients = {
                slot.index: state.gradients[slot.index]
                for slot in layout.slots
                if slot.index in state.gradients
            }
            last = layout.number == len(self.buckets) - 1
            reduction = Reduction(
                self._memory[layout.number],
                self.parameters,
                gradients,
                self._touched,
                self.comm,
                self.settings.hook,
                flag=last and not self._graphs.keys() <= self._agreed,
            )
            for index in gradients:
                state.gradients[index] = None  # the bucket has it now
                state.versions[index] = grad_version(self.parameters[index])
            state.reductions.append(reduction)
        if self._reentrant and state.root is None and not flush:
            self._finish()

    def _enter(self, order: Sequence[int] = ()) -> _Pass:
        """The state of the pass that this thread runs; begins it where it is new."""
        task = current_pass()
        state = self._pass
        if state is not None and task in state.tasks:
            return state
        nested = inside_another_pass()
        if state is not None and not nested and state.root is not None:
            raise self._failed(self._unfinished(), "the backward pass before")
        if state is None:
            state = self._pass = _Pass(self._armed, time.monotonic())
            self._reentrant = self._reentrant or nested
            try:
                self._begin(state, order)
            except BaseException:
                self._pass = None
                raise
        state.tasks.add(task)
        if nested:
            self._reentrant = True
            state.expected = [True] * len(self.parameters)
        else:
            state.root = task
            at_end_of_pass(self._finish)
        return state

    def _begin(self, state: _Pass, order: Sequence[int]) -> None:
        self._passed_since_forward = True
        if not state.sync:
            return
        self._agree(order)
        reached = [will_reach(node) for node in self._accumulators]
        state.expected = [
            self._reentrant or here or before for here, before in zip(reached, self._used_before, strict=True)
        ]
        for known in self._nodes:
            node = known()
            if node is not None and will_reach(node):
                for index in self.indices_after(node):
                    if index is not None:
                        state.remaining[index] = state.remaining.get(index, 0) + 1
        state.early = {
            index
            for index in state.remaining
            if reached[index] and self._trusted[index] and not has_foreign_hooks(self.parameters[index], 1)
        }
        self._launch_complete(state)

    def _agree(self, order: Sequence[int]) -> None:
        """Exchange what is new, where some rank has something new."""
        news = self._news is not None and bool(self._news.item())
        if self.step >= 2 and not news:
            return
        if self.step == 1:
            order = tuple(self._observed)
        known = dict.fromkeys((*order, *self._order))
        proposal = Proposal(self.step, tuple(known), tuple(self._graphs))
        found = agree(self.comm, proposal, check_graphs=self.settings.check_graphs)
        self._agreed = set(self._graphs)
        if self.step < 2 and found.order != self._order:
            self._order = found.order
            self._lay_out(self.settings.plan)

    def _lay_out(self, plan: BucketPlan | None) -> None:
        buckets = lay_out(
            self.names,
            self.parameters,
            self._order,
            cap_bytes=self.settings.cap_bytes,
            first_cap_bytes=self.settings.first_cap_bytes,
            plan=plan,
        )
        if [set(bucket.names) for bucket in buckets] == [set(bucket.names) for bucket in self.buckets]:
            return
        self.buckets = buckets
        self.bucket_of = [0] * len(self.parameters)
        for bucket in buckets:
            for slot in bucket.slots:
                self.bucket_of[slot.index] = bucket.number
        self._memory = [BucketMemory(bucket) for bucket in buckets]
        self.version += 1

    def measure(self, *, on: bool) -> None:
        """From the next pass on, note when each gradient is ready; compiled graphs are cut after each."""
        self.measuring = on
        if on:
            self.samples = []
        self.version += 1

    def use_plan(self, plan: BucketPlan) -> None:
        """Put the gradients into other buckets from the next pass on. The same on every rank.

        Raises:
            PlanError: a plan for other parameters.
            ExecutionError: a backward pass is under way.
        """
        if self._pass is not None:
            raise ExecutionError("the buckets can't change while a backward pass runs: change them after it")
        self._lay_out(plan)
        self.settings = replace(self.settings, plan=plan)

    def _finish(self) -> None:
        """All gradients are there."""
        with self._lock:
            state = self._pass
            if state is None:
                return
            try:
                if state.sync:
                    self._reduce_rest(state)
            finally:
                self._pass = None

    def _reduce_rest(self, state: _Pass) -> None:
        for index, gradient in list(state.partial.items()):
            del state.partial[index]
            self._take(state, index, gradient)
        backward_end_s = time.monotonic()
        self._launch_complete(state, flush=True)
        for reduction in state.reductions:
            reduction.finish()
        self._news = state.reductions[-1].flagged()
        self._used_before = [index in state.gradients for index in range(len(self.parameters))]
        self._touched = [False] * len(self.parameters)
        self._handed.clear()
        self.step += 1
        self.last = PassTimes(
            state.started_s,
            backward_end_s,
            tuple(
                BucketTimes.of(reduction, state.ready_s, state.started_s) for reduction in state.reductions
            ),
            {self.names[index]: ready - state.started_s for index, ready in state.ready_s.items()},
        )
        if self.measuring and self.step > 2:  # before that, some gradients go through autograd
            self.samples.append(self.last.ready_s)
        for reduction in state.reductions:
            number = reduction.layout.number
            self.tracer.add(
                f"bucket {number}",
                "reduce",
                reduction.sent_s,
                reduction.finished_s,
                bytes=reduction.layout.size_bytes,
            )
            if reduction.exposed_s:
                start = reduction.finished_s - reduction.exposed_s
                self.tracer.add(f"wait for bucket {number}", "exposed", start, reduction.finished_s)

    def _failed(self, message: str, where: str) -> ExecutionError:
        """The error to raise; all other ranks get it too."""
        error = ExecutionError(message)
        with suppress(ExecutionError):
            self.comm.fail(error, where)
        return error

    def _unfinished(self) -> str:
        state = self._pass
        assert state is not None
        missing = [name for index, name in enumerate(self.names) if index not in state.gradients]
        what = (
            f"{len(missing)} parameters, {missing[0]!r} among them, got no gradient"
            if missing
            else "it raised"
        )
        return (
            f"the backward pass before did not come to its end ({what}): an exception that ended it leaves "
            f"the "
            "ranks out of step, so start again from a checkpoint; with reentrant checkpoints every parameter "
            "has to get a gradient, so use torch.utils.checkpoint(..., use_reentrant=False)"
        )


def _accumulated(reducer: ref[Reducer], index: int, _parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found.accumulated(index)


def _is_ordinary(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Whether adding ``gradient`` to ``parameter.grad`` is what it looks like."""
    if torch.is_grad_enabled():
        return False
    existing = parameter.grad
    if existing is not None and (existing.layout is not torch.strided or existing.dtype != parameter.dtype):
        return False
    return gradient is None or (
        gradient.layout is torch.strided
        and gradient.shape == parameter.shape
        and gradient.dtype == parameter.dtype
        and gradient.device == parameter.device
    )


def _sparse(name: str) -> str:
    return (
        f"the gradient of {name!r} is sparse, and buckets are dense: build the embedding with sparse=False, "
        f"or "
        f"leave the parameter out with ignored=[{name!r}] and reduce it yourself"
    )


def _too_late(name: str) -> str:
    return (
        f"parameter {name!r} got another gradient after its bucket had been sent: it is used both by a "
        f"compiled "
        "graph and outside of it, which the first backward pass did not show; use it in one of the two, or "
        f"pass late=[{name!r}] to replicate(), which waits for all of its gradients"
    )
