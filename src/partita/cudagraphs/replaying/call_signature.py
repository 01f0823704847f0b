"""What a call of a region has to have in common with a recording, so that a replay is right.

A recording fixes shapes, strides and dtypes; the addresses of inputs that are used where they lie; the values
of numbers and of 0-d CPU tensors, which kernels get as arguments; and the modes that decide which kernels
run. All of it is the key of a recording.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.tensors.subclasses import is_plain_tensor
from partita.cudagraphs.facts.fixed_addresses import StableMemory

__all__ = ["CallKey", "CallSignature", "describe_call", "is_copied", "modes"]


class CallKey:
    """What a recording is found by: equal for the calls that it fits.

    It is looked up at each call, and of a model with some hundred parameters it is long: so its hash is
    worked out once.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CallKey) and self._parts == other._parts)


@dataclass(frozen=True, slots=True)
class CallSignature:
    """One call.

    Attributes:
        kind: all but addresses: calls of one kind need one warm-up.
        addresses: of the inputs that are used where they lie; None for those that are copied.
        copied: indices of the inputs that are copied to a buffer.
        slot: the last one in which any of its inputs lies, of those that are used where they lie.
        slot_bytes: how much of its inputs lies in slots behind the first, and is used where it lies.
        lies_in_slots: whether any of its inputs lies in a slot, and is used where it lies.
        copied_from: what lies in this slot, or one behind it, is copied; None: nothing is for that reason.
    """

    kind: tuple[Any, ...]
    addresses: tuple[int | None, ...]
    copied: tuple[int, ...]
    slot: int = 0
    slot_bytes: int = 0
    lies_in_slots: bool = False
    copied_from: int | None = None


def describe_call(
    values: Sequence[Any],
    device_type: str,
    static: frozenset[int],
    memory: StableMemory,
    *,
    copied_from: int | None = None,
) -> CallSignature | str:
    """Return the signature of a call with these flat inputs; or why it can't be recorded.

    Args:
        static: indices of the inputs that are used where they lie, whatever is declared in ``memory``.
        copied_from: see `CallSignature`.
    """
    kind: list[Any] = []
    addresses: list[int | None] = []
    copied: list[int] = []
    slot = slot_bytes = 0
    lies_in_slots = False
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
            stays = base in memory and not is_copied(its_slot, copied_from)
            if value.numel() and (number in static or stays):
                address = value.data_ptr()
                slot = max(slot, its_slot or 0)
                slot_bytes += value.nbytes if its_slot else 0
                lies_in_slots |= its_slot is not None
            else:
                copied.append(number)
        addresses.append(address)
    about_inputs = tuple(kind), tuple(addresses), tuple(copied)
    return CallSignature(*about_inputs, slot, slot_bytes, lies_in_slots, copied_from)


def is_copied(slot: int | None, copied_from: int | None) -> bool:
    """Whether what lies in a slot is copied; see `CallSignature`."""
    return slot is not None and copied_from is not None and slot >= copied_from


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
