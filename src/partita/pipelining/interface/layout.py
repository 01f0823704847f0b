"""The memory layout of tensors, sent along with them so that the receiver lays them out like the sender.

The last bits of a kernel's result depend on strides (a sum adds in the order of memory, a normalisation takes
another path for a slice) and, where matrices are multiplied, on the alignment of the first element. So each
message ends with a trailer: for each value whether it was sent, and its layout. The data is sent without
gaps. Most values have none (they are *compact*); the others are put in place where they arrive::

    sent      x[:, 8:] of x [2, 16, 4]      shape [2, 8, 4], stride [64, 4, 1], 128 bytes into x
    data      its 64 numbers
    trailer   0 (not all values are compact), strided, its storage, its offset there, 64, 4, 1
    rebuilt   memory from its first to its last number, as_strided, copy_

Values of one message that share a storage, such as the pieces of one ``chunk``, share one at the receiver
too, so that they take no more memory than at the sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from partita._torch.tensors.tensor_text import short_name
from partita.errors import ExecutionError

__all__ = [
    "are_compact",
    "compact_trailer",
    "copied",
    "empty_strided_at",
    "empty_trailer",
    "is_compact",
    "laid_out",
    "misaligned",
    "packed",
    "trailer_length",
    "trailer_of",
    "zeros_like_sent",
]

_ALIGNED = 64
"""The alignment in bytes of what torch allocates on a CPU. Matrix products of MKL and oneDNN were seen to
differ for other offsets."""

_MISSING, _COMPACT, _STRIDED = 0, 1, 2
_FIXED = 3
"""A trailer begins with 1 where all values are compact, else with 0. Then it has for each value one of the
kinds above, the number of its storage, its offset there, and its strides. For missing and compact values the
kind is repeated instead."""


def is_compact(tensor: Tensor) -> bool:
    """Whether a tensor lies like a new one: contiguous, dimensions of size 1 included, and aligned.

    >>> is_compact(torch.empty(2, 3)), is_compact(torch.empty(2, 3).t()), is_compact(torch.empty(4)[1:])
    (True, False, False)
    """
    return tensor.stride() == _compact_strides(tensor.shape) and not tensor.data_ptr() % _ALIGNED


def trailer_length(data: Sequence[Tensor]) -> int:
    """Return how many numbers the trailer of a message has.

    Args:
        data: tensors of the values' shapes.
    """
    return compact_trailer(tuple(tensor.dim() for tensor in data)).numel()


def empty_trailer(data: Sequence[Tensor]) -> Tensor:
    """Return a tensor to receive a trailer in.

    Args:
        data: tensors of the values' shapes.
    """
    length = trailer_length(data)
    if torch.is_inference_mode_enabled():  # asked first: entering the other mode costs more than the memory
        with torch.inference_mode(False):
            return torch.empty(length, dtype=torch.int64, device="cpu")
    return torch.empty(length, dtype=torch.int64, device="cpu")


def are_compact(values: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
    """Whether all values of a message are there and compact, so that `compact_trailer` is its trailer."""
    for value in values:
        if value is None or value.layout is not torch.strided or not is_compact(value):
            return False
    return True


@lru_cache(maxsize=1024)
def compact_trailer(dims: tuple[int, ...]) -> Tensor:
    """Return the trailer of a message whose values are all compact. It is shared: don't write to it.

    Args:
        dims: how many dimensions each value has.
    """
    return _as_tensor((_COMPACT,) * (1 + sum(_FIXED + dim for dim in dims)))


def trailer_of(values: Sequence[Tensor | None], data: Sequence[Tensor]) -> Tensor:
    """Return the trailer of any message. It may be shared with other messages: don't write to it.

    Args:
        values: what is sent; None for a value that is missing.
        data: tensors of their shapes.

    Returns:
        int64, on the CPU.
    """
    if are_compact(values):
        return compact_trailer(tuple(tensor.dim() for tensor in data))
    return _as_tensor(_numbers(values, data))


def _numbers(values: Sequence[Tensor | None], data: Sequence[Tensor]) -> tuple[int, ...]:
    places = _places([None if value is None or is_compact(value) else value for value in values])
    numbers = [0]
    for value, place, sent in zip(values, places, data, strict=True):
        if value is not None and place is not None:
            numbers += (_STRIDED, place.storage, place.offset, *value.stride())
        else:
            numbers += (_MISSING if value is None else _COMPACT,) * (_FIXED + sent.dim())
    return tuple(numbers)


def packed(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as they are sent: contiguous, in its shape. Where they fill their memory they
    are sent in its order, without a copy.

    Raises:
        ExecutionError: it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise ExecutionError(
            f"a tensor {tuple(tensor.shape)} of layout {short_name(tensor.layout)} is to be sent to another "
            "stage, and stages send dense ones: make it dense (to_dense()). Where it is the gradient of an "
            "embedding that several stages use, build that with sparse=False, or cut so that one stage has it"
        )
    if tensor.is_contiguous():
        return tensor
    if _is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided(tensor.shape, _compact_strides(tensor.shape))
    return tensor.contiguous()


def laid_out(trailer: Tensor, data: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the values of a message with the layout that they have at the sender.

    Args:
        trailer: as it was received.
        data: as it was received; compact values are not copied.

    Returns:
        None for a value that is missing.
    """
    numbers = trailer.tolist()
    if numbers[0]:
        return [*data]
    values: list[Tensor | None] = []
    moved: dict[int, list[_Moved]] = {}
    end = 1
    for number, received in enumerate(data):
        start, end = end, end + _FIXED + received.dim()
        kind, storage, offset = numbers[start : start + _FIXED]
        values.append(None if kind == _MISSING else received)
        if kind != _STRIDED:
            continue
        shape, strides = received.shape, tuple(numbers[start + _FIXED : end])
        value = received.as_strided(shape, strides) if _is_dense(shape, strides) else received
        values[number] = value
        if offset or value.stride() != strides:
            moved.setdefault(storage, []).append(_Moved(number, value, strides, offset))
    for together in moved.values():
        size = max(_end(part.received.shape, part.strides, part.offset) for part in together)
        first = together[0].received
        shared = torch.empty(size, dtype=first.dtype, device=first.device)
        for part in together:
            values[part.number] = _filled(shared, part)
    return values


def misaligned(tensor: Tensor) -> int:
    """The distance to the last aligned address, in elements."""
    return tensor.data_ptr() % _ALIGNED // tensor.element_size()


def empty_strided_at(
    offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a new tensor with these strides that begins so many elements behind an aligned address."""
    memory = torch.empty(_end(shape, strides, offset), dtype=dtype, device=device)
    return memory.new_empty(0).set_(memory.untyped_storage(), offset, shape, strides)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own with the same layout, gaps and alignment included. Gradients flow.

    >>> copied(torch.arange(6).view(2, 3)[:, :2]).stride()
    (3, 1)
    """
    if tensor.layout is not torch.strided or is_compact(tensor):
        return tensor.clone()
    return cast("Tensor", _Copy.apply(tensor))


class _Copy(torch.autograd.Function):
    """Passes gradients on as they are. Where autograd itself writes into a larger storage, it changes their
    layout.
    """

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
    """The memory of a value: its storage, by number in the message, and its offset there in elements."""

    storage: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Moved:
    """A received value that must be copied to its place in a storage."""

    number: int
    received: Tensor
    strides: tuple[int, ...]
    offset: int


def _filled(storage: Tensor, value: _Moved) -> Tensor:
    result = target = storage.as_strided(value.received.shape, value.strides, value.offset)
    source = value.received
    for dim, stride in enumerate(value.strides):
        if stride == 0 and source.shape[dim] > 1:  # an expanded dimension
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return result


def _places(tensors: Sequence[Tensor | None]) -> list[_Place | None]:
    """The places of the tensors that are not None. Those with gaps that share a storage stay together, unless
    that takes more memory than each of them alone.
    """
    places: list[_Place | None] = [None] * len(tensors)
    shared: dict[tuple[int, torch.dtype], list[tuple[int, Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is None:
            continue
        places[number] = _Place(number, misaligned(tensor))
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


def zeros_like_sent(
    shape: Sequence[int],
    strides: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Return zeros that lie in memory as a value would that was sent from such an example; None where the
    example has gaps or overlaps and other sizes, so that nobody knows their strides.

    Args:
        shape: of the example.
        strides: likewise.
        sizes: of the result.
    """
    shape, strides = tuple(shape), tuple(strides)
    if strides == _compact_strides(shape):
        return torch.zeros(tuple(sizes), dtype=dtype, device=device)
    if shape == tuple(sizes):
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
    if not _is_dense(shape, strides):
        return None
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    zeros = torch.zeros([sizes[dim] for dim in order], dtype=dtype, device=device)
    return zeros.permute([order.index(dim) for dim in range(len(order))])


def _end(shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """How many elements a storage needs for such a tensor at this offset."""
    if 0 in shape:
        return offset
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@lru_cache(maxsize=4096)
def _compact_strides(shape: Sequence[int]) -> tuple[int, ...]:
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
