"""Gradients as they arrive in a backward pass, and the buckets that are sent because of them.

A compiled graph offers a gradient before autograd has it. Autograd adds a gradient to ``grad`` and says so.
Either way, when the last one of the next bucket is there, that bucket is sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from partita._torch.autograd.running_pass import grad_version
from partita._torch.tensors.subclasses import inner_tensors
from partita._torch.tensors.versions import times_written
from partita.ddp.buckets.bucket_layout import BucketLayout
from partita.ddp.buckets.bucket_set import BucketSet
from partita.ddp.buckets.comm_hooks import CommHook
from partita.ddp.buckets.reduction import PassFlags, Reduction
from partita.ddp.buckets.sparse_reduction import AnyReduction, SparseReduction
from partita.ddp.reducing.consensus import Consensus
from partita.ddp.reducing.gradient import ParameterGradient
from partita.ddp.reducing.pass_errors import (
    another_gradient,
    changed_parameter,
    failed_everywhere,
    other_layout,
    wrapping_gradient,
)
from partita.ddp.reducing.pass_state import PassState
from partita.runtime import Comm
from partita.runtime.weight_sample import WeightSample

__all__ = ["GradientArrivals"]


class GradientArrivals:
    """Takes gradients, and sends buckets, of one pass after another.

    Args:
        gradients: of the trainable parameters; an index is one of these.
        consensus: is told in which order gradients get ready.
        hook: averages a bucket; None: a plain mean.
    """

    def __init__(
        self,
        gradients: Sequence[ParameterGradient],
        comm: Comm,
        *,
        buckets: BucketSet,
        consensus: Consensus,
        hook: CommHook | None,
    ) -> None:
        self._gradients = gradients
        self._parameters = [gradient.parameter for gradient in gradients]
        self._comm = comm
        self._buckets = buckets
        self._consensus = consensus
        self._hook = hook
        self._sample = WeightSample(self._parameters)
        self._times_written = [0] * len(gradients)

    def offered(self, state: PassState, index: int, offer: torch.Tensor | None) -> torch.Tensor | None:
        """Take a gradient from a compiled graph, which may know that there is none.

        Returns:
            What is left for autograd to add to ``grad``: None where it has been taken.
        """
        # 1. Can it be taken for the gradient?
        gradient, arrival = self._gradients[index], state.arrivals[index]
        if arrival.to_come is not None:
            arrival.to_come -= 1
        may_be_taken = state.sync and gradient.can_take(offer)
        if may_be_taken:
            self._consensus.observe(index)

        # 2. If not, autograd gets it, and what was taken before.
        if not may_be_taken or not arrival.early or arrival.to_come is None or arrival.to_come < 0:
            arrival.early = False
            if arrival.partial is not None:
                return arrival.with_partial(offer)
            if offer is not None and arrival.to_come is not None and gradient.parameter.grad is None:
                arrival.note_left(offer)
            return offer

        # 3. If so, it is the whole gradient, or a part of it until the other offers are there.
        offer = arrival.with_partial(offer)
        if offer is not None:
            if arrival.to_come > 0:
                arrival.partial = offer
            else:
                self._take(state, index, offer)
        return None

    def accumulates(self, index: int) -> None:
        """Note that autograd is about to add to ``grad`` of a parameter, and to call hooks of the user's. The
        pass may not have begun.
        """
        self._times_written[index] = times_written(self._parameters[index])

    def check_parameters(self, state: PassState) -> None:
        """Refuse a pass in which a hook has changed a parameter, as an optimizer does that steps in hooks: it
        has seen the gradient of this rank alone.

        Raises:
            ExecutionError: names the parameter; on every rank.
        """
        for gradient, arrival in zip(self._gradients, state.arrivals, strict=True):
            before = arrival.times_written
            if before is not None and times_written(gradient.parameter) != before:
                raise failed_everywhere(self._comm, changed_parameter(gradient.name), "backward")

    def accumulated(self, state: PassState, index: int) -> None:
        """Note that autograd is done with ``grad`` of a parameter: it has added a gradient, or had none to.

        Raises:
            ExecutionError: the gradient wraps other tensors; or it is sparse, or is not though its embedding
                says so; or its bucket has been sent.
        """
        # 1. Nothing to send: a pass that is not reduced, a gradient that was offered, or none at all.
        gradient, arrival = self._gradients[index], state.arrivals[index]
        parameter = gradient.parameter
        arrival.times_written = self._times_written[index]
        gradient.compare(arrival)
        if not state.sync:
            gradient.used = gradient.used or parameter.grad is not None
            return
        if arrival.is_there and grad_version(parameter) == arrival.version:
            return  # all of it was offered before
        if parameter.grad is None:
            arrival.expected = False
            self.send_complete(state)
            return

        # 2. What can't be sent.
        if inner_tensors(parameter.grad) is not None:
            fault = wrapping_gradient(gradient.name, parameter.grad)
            raise failed_everywhere(self._comm, fault, "backward")
        layout = torch.sparse_coo if index in self._buckets.sparse else torch.strided
        if parameter.grad.layout is not layout:
            fault = other_layout(gradient.name, parameter.grad)
            raise failed_everywhere(self._comm, fault, "backward")
        if len(state.reductions) > self._buckets.bucket_of[index]:
            raise failed_everywhere(self._comm, another_gradient(gradient.name), "backward")

        # 3. ``grad`` is the gradient, with what compiled graphs have offered of it.
        gradient.used = True
        for taken in (arrival.partial, arrival.value):
            if taken is not None:
                parameter.grad.add_(taken)
        arrival.partial = None
        self._consensus.observe(index)
        self._ready(state, index, None)

    def take_partial(self, state: PassState) -> None:
        """Take what was offered of gradients whose other offers have not come."""
        for index, arrival in enumerate(state.arrivals):
            if arrival.partial is not None:
                offer, arrival.partial = arrival.partial, None
                self._take(state, index, offer)

    def is_complete(self, state: PassState) -> bool:
        """Whether all gradients are there that buckets wait for."""
        layouts = self._buckets.layouts
        return len(state.reductions) >= len(layouts) - 1 and self._has_come(state, layouts[-1])

    def send_complete(self, state: PassState) -> None:
        """Send the buckets whose turn it is. The last one stays until the pass is over: it says how that
        ended.
        """
        layouts = self._buckets.layouts
        while len(state.reductions) < len(layouts) - 1:
            bucket = layouts[len(state.reductions)]
            if not self._has_come(state, bucket):
                return
            self._send(state, bucket, PassFlags())

    def send_rest(self, state: PassState, *, raised: bool = False) -> None:
        """Send all other buckets, complete or not. The pass is over; ``raised``: by an exception."""
        flags = PassFlags(self._consensus.has_news, raised, not raised)
        layouts = self._buckets.layouts
        for bucket in layouts[len(state.reductions) :]:
            if bucket is layouts[-1]:
                self._send(state, bucket, flags, self._sample.flags(self._consensus.step))
            else:
                self._send(state, bucket, PassFlags())

    @staticmethod
    def _has_come(state: PassState, bucket: BucketLayout) -> bool:
        """Whether all gradients that a bucket waits for are there."""
        arrivals = (state.arrivals[slot.index] for slot in bucket.slots)
        return all(arrival.is_there or not arrival.expected for arrival in arrivals)

    def _send(
        self, state: PassState, bucket: BucketLayout, flags: PassFlags, sample: torch.Tensor | None = None
    ) -> None:
        arrivals = {slot.index: state.arrivals[slot.index] for slot in bucket.slots}
        used = {index: self._gradients[index].used for index in arrivals}
        memory = self._buckets.memory[bucket.number]
        reduction: AnyReduction
        if memory is None:
            reduction = SparseReduction(
                bucket, self._parameters, used, self._comm, flags=flags, sample=sample
            )
        else:
            gradients = {index: arrival.value for index, arrival in arrivals.items() if arrival.is_there}
            reduction = Reduction(
                memory,
                self._parameters,
                gradients,
                used,
                self._comm,
                self._hook,
                flags=flags,
                sample=sample,
            )
        state.reductions.append(reduction)
        for index, arrival in arrivals.items():  # they lie in the bucket's memory now
            if arrival.is_there:
                arrival.value, arrival.version = None, grad_version(self._parameters[index])

    def pass_begins(self, state: PassState) -> None:
        """Begin a synchronised pass."""
        for gradient, arrival in zip(self._gradients, state.arrivals, strict=True):
            arrival.used_before = gradient.used
        self.send_complete(state)

    def pass_ends(self, state: PassState) -> None:
        """End a synchronised pass, whose buckets have all been reduced."""
        for gradient, arrival in zip(self._gradients, state.arrivals, strict=True):
            gradient.used, gradient.came = False, arrival.is_there

    def pass_is_dropped(self, state: PassState) -> None:
        """Undo what the gradients of a pass have changed for the next ones."""
        for gradient, arrival in zip(self._gradients, state.arrivals, strict=True):
            gradient.used = arrival.used_before

    def _take(self, state: PassState, index: int, offer: torch.Tensor) -> None:
        gradient = self._gradients[index]
        gradient.used = True
        existing = gradient.parameter.grad
        if existing is None:
            self._ready(state, index, offer)
            return
        with torch.no_grad():
            existing.add_(offer)
        self._ready(state, index, None)

    def _ready(self, state: PassState, index: int, value: torch.Tensor | None) -> None:
        arrival = state.arrivals[index]
        arrival.is_there, arrival.value = True, value
        arrival.version = grad_version(self._parameters[index])
        arrival.ready_s = time.monotonic()
        self.send_complete(state)
