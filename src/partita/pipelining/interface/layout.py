"""How tensors lie in memory, told along with them, so that a receiver lays them out like the sender.

What a kernel computes depends in its last bits on strides (a sum adds in the order of memory, a normalisation
takes another path for a slice) and, where matrices are multiplied, on how the first element is aligned. So
each message ends with a trailer: for each value whether it is there, and how it lies. The data goes without
gaps, and most values lie that way anyway; others are put in place where they arrive::

    sent      x[:, 8:] of x [2, 16, 4]      shape [2, 8, 4], stride [64, 4, 1], 128 bytes into x
    data      its 64 numbers
    trailer   there, laid out, its storage, where in it, 64, 4, 1
    rebuilt   memory for what lies between its first and its last number, as_strided, copy_

Values of one message that share a storage, such as the pieces of one ``chunk``, share one again, so that what
they take is not more than on the sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["copied", "empty_trailer", "laid_out", "lies_plainly", "packed", "trailer_length", "trailer_of"]

_ALIGNED = 64
"""To so many bytes torch aligns what it allocates on a CPU; results were seen to differ within (matrix
products of MKL and oneDNN)."""

_MISSING, _PLAIN, _LAID_OUT = 0, 1, 2
_FIXED = 3
"""A trailer has for each value: which of these it is, the number of its storage, its place in there, and its
strides. Of a plain value all are 1."""


def lies_plainly(tensor: Tensor) -> bool:
    """Whether it lies like a new tensor: contiguous, dimensions of size 1 included, and aligned.

    >>> lies_plainly(torch.empty(2, 3)), lies_plainly(torch.empty(2, 3).t()), lies_plainly(torch.empty(4)[1:])
    (True, False, False)
    """
    return tensor.stride() == _plain_strides(tensor.shape) and not tensor.data_ptr() % _ALIGNED


def trailer_length(data: Sequence[Tensor]) -> int:
    """How many numbers the trailer of a message has.

    Args:
        data: tensors of the values' shapes.
    """
    length = 0
    for tensor in data:
        length += _FIXED + tensor.dim()
    return length


def empty_trailer(data: Sequence[Tensor]) -> Tensor:
    """Where a trailer is received.

    Args:
        data: tensors of the values' shapes.
    """
    with torch.inference_mode(False):
        return torch.empty(trailer_length(data), dtype=torch.int64, device="cpu")


def trailer_of(values: Sequence[Tensor | None], data: Sequence[Tensor]) -> Tensor:
    """The trailer of a message. It may be shared with other messages: don't write to it.

    Args:
        values: None for one that is not there.
        data: tensors of their shapes.

    Returns:
        int64, on the CPU.
    """
    for value in values:
        if value is None or not lies_plainly(value):
            return _as_tensor(_numbers(values, data))
    return _as_tensor((_PLAIN,) * trailer_length(data))


def _numbers(values: Sequence[Tensor | None], data: Sequence[Tensor]) -> tuple[int, ...]:
    """Of a trailer."""
    places = _places([None if value is None or lies_plainly(value) else value for value in values])
    numbers: list[int] = []
    for value, place, sent in zip(values, places, data, strict=True):
        if value is not None and place is not None:
            numbers += (_LAID_OUT, place.storage, place.offset, *value.stride())
        else:
            numbers += (_MISSING if value is None else _PLAIN,) * (_FIXED + sent.dim())
    return tuple(numbers)


def packed(tensor: Tensor) -> Tensor:
    """Its numbers as they are sent: contiguous, in its shape. In the order of memory where it has neither
    gaps nor overlaps, and then it is not copied.
    """
    if tensor.is_contiguous():
        return tensor
    if _is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided(tensor.shape, _plain_strides(tensor.shape))
    return tensor.contiguous()


def laid_out(trailer: Tensor, data: Sequence[Tensor]) -> list[Tensor | None]:
    """The values of a message, as they lie at the sender.

    Args:
        trailer: as it was received.
        data: as it was received, in plain order; what lies so is not copied.

    Returns:
        None for a value that is not there.
    """
    numbers = trailer.tolist()
    if numbers.count(_PLAIN) == len(numbers):
        return [*data]
    values: list[Tensor | None] = []
    moved: dict[int, list[_Moved]] = {}
    at = 0
    for number, received in enumerate(data):
        start, at = at, at + _FIXED + received.dim()
        kind, storage, offset = numbers[start : start + _FIXED]
        values.append(None if kind == _MISSING else received)
        if kind != _LAID_OUT:
            continue
        shape, strides = received.shape, tuple(numbers[start + _FIXED : at])
        value = received.as_strided(shape, strides) if _is_dense(shape, strides) else received
        values[number] = value
        if offset or value.stride() != strides:
            moved.setdefault(storage, []).append(_Moved(number, value, strides, offset))
    for together in moved.values():
        size = max(_end(it.received.shape, it.strides, it.offset) for it in together)
        first = together[0].received
        storage_of_all = torch.empty(size, dtype=first.dtype, device=first.device)
        for it in together:
            values[it.number] = _filled(storage_of_all, it)
    return values


def copied(tensor: Tensor) -> Tensor:
    """A copy in memory of its own that lies like the tensor, gaps and alignment included. Gradients flow.

    >>> copied(torch.arange(6).view(2, 3)[:, :2]).stride()
    (3, 1)
    """
    return tensor.clone() if lies_plainly(tensor) else cast("Tensor", _Copy.apply(tensor))


class _Copy(torch.autograd.Function):
    """Its gradient lies as it came: autograd's own ways of writing into a larger storage lay it out anew."""

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        data = [packed(tensor).clone(memory_format=torch.contiguous_format)]
        (result,) = laid_out(trailer_of([tensor], data), data)
        assert result is not None
        # autograd lets nobody write into a view that a Function returns
        return tensor.new_empty(0).set_(
            result.untyped_storage(), result.storage_offset(), result.shape, result.stride()
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is needed later."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return gradients[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value lies: the number of its storage among those of the message, and how many elements behind
    its start.
    """

    storage: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Moved:
    """A value that has to be put in place."""

    number: int
    received: Tensor
    strides: tuple[int, ...]
    offset: int


def _filled(storage: Tensor, value: _Moved) -> Tensor:
    result = target = storage.as_strided(value.received.shape, value.strides, value.offset)
    source = value.received
    for dim, stride in enumerate(value.strides):
        if stride == 0 and source.shape[dim] > 1:  # the same number again and again
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return result


def _places(tensors: Sequence[Tensor | None]) -> list[_Place | None]:
    """Of those that are given. What has gaps lies with others of its storage, unless that takes more memory
    than each of them alone.
    """
    places: list[_Place | None] = [None] * len(tensors)
    shared: dict[tuple[int, torch.dtype], list[tuple[int, Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is None:
            continue
        places[number] = _Place(number, _misaligned(tensor))
        if not _is_dense(tensor.shape, tensor.stride()):
            key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
            shared.setdefault(key, []).append((number, tensor))
    for together in shared.values():
        start = min(tensor.data_ptr() for _, tensor in together) // _ALIGNED * _ALIGNED
        offsets = [(tensor.data_ptr() - start) // tensor.element_size() for _, tensor in together]
        ends = [
            (_end(tensor.shape, tensor.stride(), offset), _end(tensor.shape, tensor.stride(), 0))
            for (_, tensor), offset in zip(together, offsets, strict=True)
        ]
        if len(together) > 1 and max(end for end, _ in ends) <= sum(alone for _, alone in ends):
            storage = together[0][0]
            for (number, _), offset in zip(together, offsets, strict=True):
                places[number] = _Place(storage, offset)
    return places


def _misaligned(tensor: Tensor) -> int:
    """By how many elements."""
    return tensor.data_ptr() % _ALIGNED // tensor.element_size()


def _end(shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """How many elements a storage needs that holds such a tensor there."""
    if 0 in shape:
        return offset
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@lru_cache(maxsize=4096)
def _plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill the memory between the first and the last, each once."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=1024)
def _as_tensor(numbers: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(False):  # it outlives the mode
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
