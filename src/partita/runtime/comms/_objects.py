"""Small Python objects as messages of a fixed size: most fit into one, a large one needs a second.

    header, uint8[1024]:  | length, 8 bytes little-endian | the first 1016 bytes of the pickle |
    rest, uint8[length - 1016], only where the pickle is longer

A message is a bytearray, and the tensor that travels is a view of it: no copy between the two.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import torch

__all__ = ["HEADER_BYTES", "as_tensor", "pack", "pickled", "rest_bytes", "unpack"]

HEADER_BYTES = 1024
_INLINE = HEADER_BYTES - 8


def pickled(obj: Any) -> bytes:
    """Return the pickle of `obj`. Tensors of any dtype come back from it: torch's own pickles of the newer
    ones (float8, uint16, complex32) can't be read.

    >>> pickle.loads(pickled(torch.tensor([3], dtype=torch.uint16)))
    tensor([3], dtype=torch.uint16)
    """
    buffer = BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_PICKLED_BY_TORCH = frozenset((*_FLOATS, *_INTEGERS))


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.dtype in _PICKLED_BY_TORCH or obj.layout != torch.strided:
            return NotImplemented
        data = obj.detach().contiguous().reshape(-1).view(torch.uint8)
        return _tensor_of, (data, obj.dtype, obj.shape, obj.requires_grad)


def _tensor_of(
    data: torch.Tensor, dtype: torch.dtype, shape: torch.Size, requires_grad: bool
) -> torch.Tensor:
    return data.view(dtype).reshape(shape).requires_grad_(requires_grad)


def pack(obj: Any) -> list[bytearray]:
    """Return one or two messages that carry `obj`."""
    data = pickled(obj)
    header = bytearray(HEADER_BYTES)
    header[:8] = len(data).to_bytes(8, "little")
    first = data[:_INLINE]
    header[8 : 8 + len(first)] = first
    return [header] if len(data) <= _INLINE else [header, bytearray(data[_INLINE:])]


def as_tensor(message: bytearray) -> torch.Tensor:
    """Return the message's memory as a uint8 tensor."""
    return torch.frombuffer(message, dtype=torch.uint8)


def rest_bytes(header: bytearray) -> int:
    """Return how many bytes the second message has; 0 where there is none."""
    return max(0, int.from_bytes(header[:8], "little") - _INLINE)


def unpack(header: bytearray, rest: bytearray) -> Any:
    """Return the object that :func:`pack` was given; `rest` is empty where there is no second message."""
    length = int.from_bytes(header[:8], "little")
    body = memoryview(header)[8 : 8 + min(length, _INLINE)]
    return pickle.loads(bytes(body) + rest if rest else body)
