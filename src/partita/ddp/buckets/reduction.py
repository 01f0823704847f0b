"""One bucket on its way: filled from gradients, averaged over all ranks, handed back.

fill    view of weight  <- gradient / ranks       (one pass over the memory)
launch  all_reduce(flat)                          runs while backward goes on
wait    for the mean
hand back   parameter.grad = view of weight       no copy where there was no gradient before
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass

import torch

from partita._torch.autograd.running_pass import storage_users
from partita.ddp.buckets.bucket_layout import BucketLayout, Slot
from partita.ddp.buckets.comm_hooks import CommHook, start_averaging
from partita.runtime import Comm, Handle
from partita.runtime.publish_errors import publish_errors
from partita.runtime.weight_sample import SAMPLE_FLAGS

__all__ = ["FLAGS", "BucketMemory", "PassFlags", "Reduction", "flag_numbers", "start_sum"]


@dataclass(frozen=True)
class PassFlags:
    """What a rank says of its pass in the last bucket.

    Attributes:
        has_news: it has compiled what the others do not know of.
        raised: the pass was ended by an exception.
        went_well: it was not.
    """

    has_news: bool = False
    raised: bool = False
    went_well: bool = False


FLAGS = len(astuple(PassFlags())) + SAMPLE_FLAGS
"""How many numbers of a bucket are those of the pass."""

_IN_HOOK = "the comm_hook of a replicated module"


class BucketMemory:
    """The flat memory of one bucket, used again where nobody else has kept a part of it."""

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        self._flat: torch.Tensor | None = None

    def take(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return memory for all gradients, a flag for each, and those of the pass; not initialised.

        Gradients that lie in it already, at their places, stay where they are.
        """
        if self._flat is not None:
            flat = self._flat
            inside = 0
            for slot in self.layout.slots:
                gradient = parameters[slot.index].grad
                if gradient is not None and _lies_at(gradient, flat, slot):
                    inside += 1
            if storage_users(flat) == 1 + inside:
                return flat
        size = self.layout.elements + len(self.layout.slots) + FLAGS
        self._flat = torch.empty(size, dtype=self.layout.dtype, device=self.layout.device)
        return self._flat


class Reduction:
    """The reduction of one bucket in one backward pass.

    Args:
        gradients: by parameter index: the gradient to reduce, or None for what has been added to
            ``parameter.grad``. A parameter that is not in it has got no gradient in this pass.
        used: which parameters count as used, by index.
        hook: averages the bucket; None: divided by the number of ranks, and summed.
        flags: travel along; see `flagged`.
        sample: of the weights, see `WeightSample`; travels behind the flags.
    """

    def __init__(
        self,
        memory: BucketMemory,
        parameters: Sequence[torch.Tensor],
        gradients: Mapping[int, torch.Tensor | None],
        used: Mapping[int, bool],
        comm: Comm,
        hook: CommHook | None,
        *,
        flags: PassFlags,
        sample: torch.Tensor | None = None,
    ) -> None:
        self.layout = memory.layout
        self._parameters = parameters
        self._used = used
        self._flat = memory.take(parameters)
        self._views = [
            self._flat.as_strided(slot.shape, slot.strides, slot.offset) for slot in self.layout.slots
        ]
        self._fill(gradients, 1.0 if hook is not None else 1.0 / comm.size, flags, sample)
        self.sent_s = time.monotonic()
        self._handles = self._launch(comm, hook)
        self._by_hook = None if hook is None else comm
        self.exposed_s = 0.0
        self.finished_s = 0.0

    def flagged(self) -> torch.Tensor:
        """Return an element for each flag of the pass and then of the sample: not zero where some rank has
        set it; after `wait`.
        """
        return self._flat[-FLAGS:].clone()

    def _fill(
        self,
        gradients: Mapping[int, torch.Tensor | None],
        scale: float,
        pass_flags: PassFlags,
        sample: torch.Tensor | None,
    ) -> None:
        with torch.no_grad():
            for slot, view in zip(self.layout.slots, self._views, strict=True):
                gradient = gradients.get(slot.index)
                if gradient is None:
                    gradient = self._parameters[slot.index].grad
                if gradient is None:
                    view.zero_()
                elif scale != 1.0:
                    torch.mul(gradient, scale, out=view)
                elif not _lies_at(gradient, self._flat, slot):
                    view.copy_(gradient)
            flags = flag_numbers([self._used[slot.index] for slot in self.layout.slots], pass_flags)
            self._flat[self.layout.elements :].copy_(torch.tensor(flags, dtype=self.layout.dtype))
            if sample is not None:
                self._flat[-SAMPLE_FLAGS:].copy_(sample)

    def _launch(self, comm: Comm, hook: CommHook | None) -> list[Handle]:
        """Flags travel in the bucket, except where a hook averages it: it may round, drop or mix what it is
        given.
        """
        if hook is None:
            return [start_sum(self._flat, comm)]
        gradients, flags = self._flat[: self.layout.elements], self._flat[self.layout.elements :]
        with publish_errors(comm, _IN_HOOK):  # the others wait for what it would have sent
            return [start_sum(flags, comm), start_averaging(hook, gradients, comm)]

    def wait(self) -> None:
        """Wait until the mean is there."""
        started = time.monotonic()
        with nullcontext() if self._by_hook is None else publish_errors(self._by_hook, _IN_HOOK):
            for handle in self._handles:
                handle.wait()
        self.finished_s = time.monotonic()
        self.exposed_s = self.finished_s - started

    def hand_back(self) -> None:
        """Put the mean into ``grad`` of every parameter that some rank has used."""
        flags: list[float] | None = None
        with torch.no_grad():
            for position, (slot, view) in enumerate(zip(self.layout.slots, self._views, strict=True)):
                if not self._used[slot.index]:
                    if flags is None:
                        flags = self._flat[self.layout.elements :].abs().tolist()
                    if not flags[position]:
                        continue
                _hand_back(self._parameters[slot.index], view, self._flat, slot)
        self._views.clear()


def flag_numbers(used: Sequence[bool], flags: PassFlags) -> list[float]:
    """Return the numbers that end a bucket: a flag for each gradient, those of the pass, and room for a
    sample of the weights.
    """
    return [float(flag) for flag in (*used, *astuple(flags))] + [0.0] * SAMPLE_FLAGS


def start_sum(flat: torch.Tensor, comm: Comm) -> Handle:
    """Start to sum numbers over all ranks, in place."""
    numbers = torch.view_as_real(flat) if flat.is_complex() else flat
    return comm.all_reduce(numbers, tuple(range(comm.size)))


def _hand_back(parameter: torch.Tensor, view: torch.Tensor, flat: torch.Tensor, slot: Slot) -> None:
    if parameter.grad is None:
        parameter.grad = view
    elif not _lies_at(parameter.grad, flat, slot):
        parameter.grad.copy_(view)


def _lies_at(tensor: torch.Tensor, flat: torch.Tensor, slot: Slot) -> bool:
    return (
        tensor.data_ptr() == flat.data_ptr() + slot.offset * flat.element_size()
        and tensor.dtype == flat.dtype
        and tensor.stride() == slot.strides
        and tensor.numel() > 0
    )
