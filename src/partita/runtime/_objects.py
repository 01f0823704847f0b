"""Small Python objects as messages of a fixed size: most fit into one, a large one needs a second.

header, uint8[1024]:  | length, 8 bytes little-endian | the first 1016 bytes of the pickle |
rest, uint8[length - 1016], only where the pickle is longer
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

__all__ = ["HEADER_BYTES", "pack", "rest_bytes", "unpack"]

HEADER_BYTES = 1024
_INLINE = HEADER_BYTES - 8


def pack(obj: Any) -> list[torch.Tensor]:
    """One or two uint8 tensors that carry `obj`."""
    data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    head = len(data).to_bytes(8, "little") + data[:_INLINE]
    messages = [torch.frombuffer(bytearray(head.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)]
    if len(data) > _INLINE:
        messages.append(torch.frombuffer(bytearray(data[_INLINE:]), dtype=torch.uint8))
    return messages


def rest_bytes(header: torch.Tensor) -> int:
    """How many bytes the second message has; 0: there is none."""
    return max(0, int.from_bytes(_bytes(header)[:8], "little") - _INLINE)


def unpack(header: torch.Tensor, rest: torch.Tensor | None) -> Any:
    """The object that :func:`pack` was given."""
    data = _bytes(header)
    length = int.from_bytes(data[:8], "little")
    body = data[8 : 8 + min(length, _INLINE)]
    return pickle.loads(body if rest is None else body + _bytes(rest))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())
