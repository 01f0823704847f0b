"""How a bucket is averaged over all ranks: as it is, or made smaller on the way."""

from __future__ import annotations

from typing import Protocol

import torch

from partita.errors import ArgumentError, ExecutionError
from partita.runtime import Comm, Handle

__all__ = ["CommHook", "bf16_compress", "check_comm_hook", "fp16_compress", "start_averaging"]


class CommHook(Protocol):
    """Starts to average one bucket over all ranks, in place."""

    def __call__(self, flat: torch.Tensor, comm: Comm) -> Handle:
        """Start, and return what ends it.

        Args:
            flat: one dimension; the gradients of this rank, not divided by anything, and nothing else.
        """
        ...


def check_comm_hook(hook: object) -> None:
    """Refuse what can't average a bucket, such as a hook for torch's DDP.

    Raises:
        ArgumentError: the message says what is taken.
    """
    if hook is None:
        return
    if not callable(hook):
        raise ArgumentError(
            f"comm_hook is a function of a flat bucket and a comm, got {hook!r}: give fp16_compress or "
            "bf16_compress of partita.ddp, or a CommHook of your own"
        )
    if str(getattr(hook, "__module__", "")).startswith("torch."):
        raise ArgumentError(
            f"comm_hook is torch's {_name(hook)}, which takes a state and a GradBucket: give fp16_compress "
            "or bf16_compress of partita.ddp, or a CommHook of your own, which takes a flat bucket and a comm"
        )


def start_averaging(hook: CommHook, flat: torch.Tensor, comm: Comm) -> Handle:
    """Start to average a bucket by a hook.

    Raises:
        ExecutionError: it returned something that can't be waited for.
    """
    handle = hook(flat, comm)
    if not callable(getattr(handle, "wait", None)):
        raise ExecutionError(
            f"comm_hook {_name(hook)} returned {type(handle).__name__}, which has no wait(): return what "
            "comm.all_reduce() returns, or an object whose wait() ends the averaging"
        )
    return handle


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


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
