"""How a bucket is averaged over all ranks: as it is, or made smaller on the way."""

from __future__ import annotations

from typing import Protocol

import torch

from partita.runtime import Comm, Handle

__all__ = ["CommHook", "bf16_compress", "fp16_compress"]


class CommHook(Protocol):
    """Starts to average one bucket over all ranks, in place."""

    def __call__(self, flat: torch.Tensor, comm: Comm) -> Handle:
        """Start, and return what ends it.

        Args:
            flat: one dimension; the gradients of this rank, not divided by anything. The last elements, one
                for each parameter and one more, are flags, 0 or 1: what is not zero on some rank must not be
                zero afterwards, as holds for a mean.
        """
        ...


def fp16_compress(flat: torch.Tensor, comm: Comm) -> Handle:
    """Halve what travels: gradients are rounded to float16, divided and summed in it, and widened again.

    The same arithmetic as torch's ``fp16_compress_hook``. Gradients beyond 65504 turn into infinity.
    """
    return _Compressed(flat, torch.float16, comm)


def bf16_compress(flat: torch.Tensor, comm: Comm) -> Handle:
    """Halve what travels: gradients are rounded to bfloat16, divided and summed in it, and widened again.

    The same arithmetic as torch's ``bf16_compress_hook``.
    """
    return _Compressed(flat, torch.bfloat16, comm)


class _Compressed:
    def __init__(self, flat: torch.Tensor, dtype: torch.dtype, comm: Comm) -> None:
        self._flat = flat
        self._small = flat.to(dtype).div_(comm.size)
        self._handle = comm.all_reduce(self._small, tuple(range(comm.size)))

    def wait(self) -> None:
        self._handle.wait()
        self._flat.copy_(self._small)
