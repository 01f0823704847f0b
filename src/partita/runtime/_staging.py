"""Tensors as a network takes them: contiguous memory on its own device, without grad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

__all__ = ["as_bytes", "copied_back", "staged_for_receiving", "staged_for_sending"]


def staged_for_sending(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`tensor` itself where it is as it has to be; else a copy of it."""
    if _is_plain(tensor) and tensor.device == device and tensor.dtype == dtype and not tensor.requires_grad:
        return tensor
    return tensor.detach().to(device, dtype).resolve_conj().resolve_neg().contiguous()


def staged_for_receiving(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`buffer` where it can be filled as it is; else memory to copy from afterwards, see `copied_back`."""
    if not _is_plain(buffer) or buffer.device != device:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return buffer.detach() if buffer.requires_grad else buffer


def copied_back(tensor: torch.Tensor, staged: torch.Tensor) -> Callable[[], None] | None:
    """What is to be done when `staged` has been filled; None where its memory is that of `tensor`."""
    if staged.data_ptr() == tensor.data_ptr() and staged.device == tensor.device:
        return None
    return partial(_copy, tensor, staged)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory: NCCL has no type for complex numbers and some integers."""
    return tensor.view(-1).view(torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, read in order, is its value (a lazy conjugate's is not)."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
