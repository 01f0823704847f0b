"""Tensors as a network takes them: contiguous memory on its own device, without grad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

__all__ = [
    "all_copied_back",
    "as_bytes",
    "copied_back",
    "staged_for_receiving",
    "staged_for_sending",
]


def staged_for_sending(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `tensor` itself where it is contiguous, on the device and of the dtype; else a copy that is."""
    if tensor.device == device and tensor.dtype == dtype and _is_sendable(tensor):
        return tensor
    return tensor.detach().to(device, dtype).resolve_conj().resolve_neg().contiguous()


def staged_for_receiving(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `buffer` where it can be filled as it is; else a new tensor, which `copied_back` copies."""
    if buffer.requires_grad:
        buffer = buffer.detach()
    if buffer.device == device and _is_sendable(buffer):
        return buffer
    return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def copied_back(tensor: torch.Tensor, staged: torch.Tensor) -> Callable[[], None] | None:
    """Return a function that copies `staged` to `tensor`; None where they have the same memory."""
    if staged.data_ptr() == tensor.data_ptr() and staged.device == tensor.device:
        return None
    return partial(_copy, tensor, staged)


def all_copied_back(tensors: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that copies each of `staged` to its tensor, where that has other memory."""
    pairs = zip(tensors, staged, strict=True)
    return partial(_run_all, [copy for to, one in pairs if (copy := copied_back(to, one)) is not None])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes: NCCL has no type for complex numbers and some integers, and gloo
    broadcasts no float8, nor some integers.
    """
    return tensor.view(-1).view(torch.uint8)


def _is_sendable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, read in order, is its value (a lazy conjugate's is not), and no gradient
    is wanted.
    """
    return tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def _run_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
