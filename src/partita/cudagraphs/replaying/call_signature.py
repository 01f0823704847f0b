"""What a call of a region has to have in common with a recording, so that a replay is right.

A recording fixes shapes, strides and dtypes; the addresses of inputs that are used where they lie; the values
of numbers and of 0-d CPU tensors, which kernels get as arguments; and the modes that decide which kernels
run. All of it is the key of a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.tensors.subclasses import is_plain_tensor
from partita.cudagraphs.facts.fixed_addresses import StableMemory

__all__ = ["CallSignature", "describe_call", "modes"]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """One call.

    Attributes:
        kind: all but addresses: calls of one kind need one warm-up.
        addresses: of the inputs that are used where they lie; None for those that are copied.
        copied: indices of the inputs that are copied to a buffer.
        slot: the last one in which any of its inputs lies, of those that are used where they lie.
        slot_bytes: how much of its inputs lies in slots behind the first, and is used where it lies.
        copies_slots: whether what lies in slots behind the first is copied.
    """

    kind: tuple[Any, ...]
    addresses: tuple[int | None, ...]
    copied: tuple[int, ...]
    slot: int = 0
    slot_bytes: int = 0
    copies_slots: bool = False


def describe_call(
    values: Sequence[Any],
    device_type: str,
    static: frozenset[int],
    memory: StableMemory,
    *,
    copies_slots: bool = False,
) -> CallSignature | str:
    """Return the signature of a call with these flat inputs; or why it can't be recorded.

    Args:
        static: indices of the inputs that are used where they lie, whatever is declared in ``memory``.
        copies_slots: see `CallSignature`.
    """
    kind: list[Any] = []
    addresses: list[int | None] = []
    copied: list[int] = []
    slot = slot_bytes = 0
    for number, value in enumerate(values):
        address = None
        if not isinstance(value, torch.Tensor):
            # repr tells apart 0.0 and -0.0, and calls all NaN alike
            kind.append((type(value), repr(value)))
        elif not is_plain_tensor(value) or value.layout is not torch.strided:
            return f"input {number} is a {type(value).__name__} of layout {value.layout}"
        elif value.is_conj() or value.is_neg():
            return f"input {number} is a lazy conjugate or negative"
        elif value.device.type != device_type:
            if value.device.type != "cpu" or value.dim():
                return f"input {number} lies on {value.device}, not on {device_type}"
            kind.append((value.dtype, repr(value.item())))
        else:
            kind.append((value.shape, value.stride(), value.dtype, value.device))
            base = value.untyped_storage().data_ptr()
            its_slot = memory.slot_of(base)
            stays = base in memory and not (copies_slots and its_slot)
            if value.numel() and (number in static or stays):
                address = value.data_ptr()
                slot = max(slot, its_slot)
                slot_bytes += value.nbytes if its_slot else 0
            else:
                copied.append(number)
        addresses.append(address)
    about_inputs = tuple(kind), tuple(addresses), tuple(copied)
    return CallSignature(*about_inputs, slot, slot_bytes, copies_slots)


def modes(device_type: str) -> tuple[Any, ...]:
    """Return the state of the interpreter that decides which kernels a call runs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *(_cuda_modes() if device_type == "cuda" else ()),
    )


def _cuda_modes() -> tuple[bool, ...]:
    """The switches of libraries that choose a kernel."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return (
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
