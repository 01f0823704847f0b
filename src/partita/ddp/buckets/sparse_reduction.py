"""The sparse gradient of one embedding on its way: the rows that each rank has, to all ranks.

launch      all_reduce([rows of rank 0, rows of rank 1, ... | flags])   runs while backward goes on
wait        all_reduce(the places of all rows), all_reduce(the rows / ranks): each rank fills in its own
hand back   parameter.grad = sparse tensor of them, rows at one place added up in the order of ranks

A rank without a gradient takes part with no rows. Where a bucket of dense gradients moves the whole
parameter, this moves the rows of the batches, once for each rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from partita.ddp.buckets.bucket_layout import BucketLayout
from partita.ddp.buckets.reduction import FLAGS, PassFlags, Reduction, flag_numbers, start_sum
from partita.runtime import Comm

__all__ = ["AnyReduction", "SparseReduction"]


class SparseReduction:
    """The reduction of one sparse gradient in one backward pass; the other arguments are as in `Reduction`.

    Args:
        layout: a sparse one.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.Tensor],
        used: Mapping[int, bool],
        comm: Comm,
        *,
        flags: PassFlags,
        sample: torch.Tensor | None = None,
    ) -> None:
        (slot,) = layout.slots
        self.layout = layout
        self.exposed_s = 0.0
        self.finished_s = 0.0
        self._comm = comm
        self._parameter = parameters[slot.index]
        gradient = self._parameter.grad
        if gradient is not None and gradient.layout is torch.strided:  # put there by hand
            gradient = gradient.to_sparse(1)
        self._own = None if gradient is None else gradient.detach().coalesce()
        rows = [0.0] * comm.size
        rows[comm.rank] = 0.0 if self._own is None else float(self._own.indices().shape[1])
        numbers = torch.tensor([*rows, *flag_numbers([used[slot.index]], flags)], dtype=torch.float64)
        if sample is not None:
            numbers[-sample.numel() :] = sample
        self._numbers = numbers.to(layout.device)
        self._mean: torch.Tensor | None = None
        self.sent_s = time.monotonic()
        self._handle = start_sum(self._numbers, comm)

    def flagged(self) -> torch.Tensor:
        """Return what `Reduction.flagged` does."""
        return self._numbers[-FLAGS:].clone()

    def wait(self) -> None:
        """Wait for the numbers of rows, exchange the rows, and wait for these."""
        started = time.monotonic()
        self._handle.wait()
        *rows, is_used = self._numbers[: self._comm.size + 1].tolist()
        if is_used:
            self._mean = self._exchanged([round(count) for count in rows])
        self.finished_s = time.monotonic()
        self.exposed_s = self.finished_s - started

    def _exchanged(self, rows: Sequence[int]) -> torch.Tensor:
        parameter, own, rank = self._parameter, self._own, self._comm.rank
        places = torch.zeros((1, sum(rows)), dtype=torch.int64, device=parameter.device)
        values = torch.zeros(
            (sum(rows), *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device
        )
        if own is not None:
            start = sum(rows[:rank])
            part = slice(start, start + rows[rank])
            places[:, part] = own.indices()
            torch.mul(own.values(), 1.0 / self._comm.size, out=values[part])
        if sum(rows):
            for handle in (start_sum(places, self._comm), start_sum(values, self._comm)):
                handle.wait()
        return torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False).coalesce()

    def hand_back(self) -> None:
        """Put the mean into ``grad``, where some rank has used the parameter."""
        if self._mean is not None:
            self._parameter.grad, self._mean = self._mean, None


AnyReduction = Reduction | SparseReduction
"""That of one bucket."""
