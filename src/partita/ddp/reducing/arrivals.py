"""Gradients as they arrive in a backward pass, and the buckets that are sent because of them.

A compiled graph offers a gradient before autograd has it. Autograd adds a gradient to ``grad`` and says so.
Either way, when the last one of the next bucket is there, that bucket is sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from partita._torch.autograd.running_pass import grad_version
from partita.ddp.reducing.bucket_layout import BucketLayout
from partita.ddp.reducing.bucket_set import BucketSet
from partita.ddp.reducing.comm_hooks import CommHook
from partita.ddp.reducing.complete_gradients import CompleteGradients, can_be_added
from partita.ddp.reducing.consensus import Consensus
from partita.ddp.reducing.pass_errors import another_gradient, failed_everywhere, sparse_gradient
from partita.ddp.reducing.pass_state import PassState
from partita.ddp.reducing.reduction import PassFlags, Reduction
from partita.runtime import Comm

__all__ = ["GradientArrivals"]


class GradientArrivals:
    """Takes gradients, and sends buckets, of one pass after another.

    Args:
        names: of the trainable parameters.
        parameters: themselves, in the same order.
        trust: is told which offers were the whole gradient.
        consensus: is told in which order gradients get ready.
        hook: averages a bucket; None: a plain mean.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        comm: Comm,
        *,
        buckets: BucketSet,
        trust: CompleteGradients,
        consensus: Consensus,
        hook: CommHook | None,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._comm = comm
        self._buckets = buckets
        self._trust = trust
        self._consensus = consensus
        self._hook = hook
        self._used = [False] * len(parameters)  # since the last synchronised pass, by parameter

    def offered(self, state: PassState, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A compiled graph has computed a gradient, or knows that there is none.

        Returns:
            What is left for autograd to add to ``grad``: None where it has been taken.
        """
        if index in state.remaining:
            state.remaining[index] -= 1
        if not state.sync or not can_be_added(gradient, self._parameters[index]):
            return self._decline(state, index, gradient)
        self._consensus.observe(index)
        if index not in state.early or state.remaining[index] < 0:
            return self._decline(state, index, gradient)
        gradient = state.added_to_partial(index, gradient)
        if gradient is None:
            return None
        if state.remaining[index] > 0:
            state.partial[index] = gradient
        else:
            self._take(state, index, gradient)
        return None

    def accumulated(self, state: PassState, index: int) -> None:
        """Autograd is done with ``grad`` of a parameter: it has added a gradient, or had none to add.

        Raises:
            ExecutionError: the gradient is sparse, or its bucket has been sent.
        """
        parameter = self._parameters[index]
        self._trust.compare(index, parameter.grad, foreseen=state.remaining.get(index) == 0)
        if not state.sync:
            self._used[index] = self._used[index] or parameter.grad is not None
            return
        if index in state.gradients and grad_version(parameter) == state.versions[index]:
            return  # all of it was offered before
        if parameter.grad is None:
            state.expected[index] = False
            self.send_complete(state)
            return
        if parameter.grad.layout is not torch.strided:
            raise failed_everywhere(self._comm, sparse_gradient(self._names[index]), "backward")
        if len(state.reductions) > self._buckets.bucket_of[index]:
            raise failed_everywhere(self._comm, another_gradient(self._names[index]), "backward")
        self._used[index] = True
        for taken in (state.partial.pop(index, None), state.gradients.get(index)):
            if taken is not None:
                parameter.grad.add_(taken)
        self._consensus.observe(index)
        self._ready(state, index, None)

    def take_partial(self, state: PassState) -> None:
        """Take what was offered of gradients whose other offers have not come."""
        for index, gradient in list(state.partial.items()):
            del state.partial[index]
            self._take(state, index, gradient)

    def is_complete(self, state: PassState) -> bool:
        """Whether all gradients are there that buckets wait for."""
        layouts = self._buckets.layouts
        return len(state.reductions) >= len(layouts) - 1 and state.is_complete(layouts[-1])

    def send_complete(self, state: PassState) -> None:
        """Send the buckets whose turn it is. The last one stays until the pass is over: it says how that
        ended.
        """
        layouts = self._buckets.layouts
        while len(state.reductions) < len(layouts) - 1:
            bucket = layouts[len(state.reductions)]
            if not state.is_complete(bucket):
                return
            self._send(state, bucket, PassFlags())

    def send_rest(self, state: PassState, *, raised: bool = False) -> None:
        """Send all other buckets, complete or not. The pass is over; ``raised``: by an exception."""
        flags = PassFlags(self._consensus.has_news, raised, not raised)
        layouts = self._buckets.layouts
        for bucket in layouts[len(state.reductions) :]:
            self._send(state, bucket, flags if bucket is layouts[-1] else PassFlags())

    def _send(self, state: PassState, bucket: BucketLayout, flags: PassFlags) -> None:
        state.reductions.append(
            Reduction(
                self._buckets.memory[bucket.number],
                self._parameters,
                state.in_bucket(bucket),
                self._used,
                self._comm,
                self._hook,
                flags=flags,
            )
        )
        state.taken_from(bucket, self._parameters)

    def pass_begins(self, state: PassState) -> None:
        """A synchronised pass begins."""
        state.used_before = tuple(self._used)
        self.send_complete(state)

    def pass_ends(self) -> None:
        """All buckets of a synchronised pass have been reduced."""
        self._used = [False] * len(self._parameters)
        self._trust.pass_ends()

    def pass_is_dropped(self, state: PassState) -> None:
        """What has come in a pass does not count."""
        self._used = list(state.used_before)
        self._trust.pass_ends()

    def _decline(self, state: PassState, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Leave a gradient, and what was taken of it before, to autograd."""
        state.early.discard(index)
        if index in state.partial:
            return state.added_to_partial(index, gradient)
        if gradient is not None and index in state.remaining and self._parameters[index].grad is None:
            self._trust.note_offer(index, gradient)
        return gradient

    def _take(self, state: PassState, index: int, gradient: torch.Tensor) -> None:
        parameter = self._parameters[index]
        self._used[index] = True
        if parameter.grad is None:
            self._ready(state, index, gradient)
            return
        with torch.no_grad():
            parameter.grad.add_(gradient)
        self._ready(state, index, None)

    def _ready(self, state: PassState, index: int, gradient: torch.Tensor | None) -> None:
        state.gradients[index] = gradient
        state.versions[index] = grad_version(self._parameters[index])
        state.ready_s[index] = time.monotonic()
        self.send_complete(state)
