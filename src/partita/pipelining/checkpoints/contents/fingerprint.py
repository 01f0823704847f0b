"""A hash of a tensor, by which ranks compare their copies without sending them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["fingerprint"]

_BLOCK = {"cpu": 2**20}
"""Bytes hashed at a time, by type of device: what fits in a processor's cache."""

_LARGE_BLOCK = 2**25
"""On other devices; some four times as much memory is needed."""


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's values and their positions, computed on its device.

    Each 8-byte word and its position go through the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
    "Fast Splittable Pseudorandom Number Generators"), and the results are summed. It is not cryptographic.

    >>> one = torch.arange(5.0)
    >>> fingerprint(one) == fingerprint(one.clone()), fingerprint(one) == fingerprint(one.flip(0))
    (True, False)
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = min(_BLOCK.get(data.device.type, _LARGE_BLOCK), data.numel())
    places = torch.arange(1, size // 8 + 2, device=data.device) * _signed(0x9E3779B97F4A7C15)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), max(size, 1)):
        block = data[start : start + size]
        words = functional.pad(block, (0, -block.numel() % 8)).view(torch.int64)  # a copy: aligned
        mixed = _mix(words.add_(places[: words.numel()])).sum()
        total = total * _signed(0xD1342543DE82EF95) + mixed  # the order of the blocks counts too
    return int(total)


def _mix(words: Tensor) -> Tensor:
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's own copies the sign."""
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64
