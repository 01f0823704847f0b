"""Packets as messages: their sizes are known only when they are there.

::

    head              uint8[32 KiB]     the length of the description (8 bytes), and its beginning
    the rest of it    uint8[...]        where it is longer
    tensors           as they lie in memory

The description has what all tensors look like, what is no tensor, and small tensors on the CPU, so that a
packet of one token is one message. All have one tag: they arrive in order. Memory can't be allocated before
the length is known, so `receive_bundle` waits for the description and returns once the receives of the
tensors are posted.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from partita.errors import ExecutionError
from partita.pipelining.interface.layout import empty_strided_at, misaligned
from partita.runtime import Comm, Handle

__all__ = ["Bundle", "receive_bundle", "send_bundle"]

_CPU = torch.device("cpu")
_HEAD = 2**15
_LENGTH = 8
"""Bytes of the first message, and of the length in it."""
_SMALL = 2**13
"""Tensors of so many bytes go with the description."""


class Bundle(Protocol):
    """What is sent as one message: tensors by number, and anything that can be pickled."""

    @property
    def values(self) -> Mapping[int, Tensor]:
        """The tensors."""
        ...

    def with_values(self, values: Mapping[int, Tensor]) -> Bundle:
        """Return a copy with other tensors."""
        ...


def send_bundle(comm: Comm, bundle: Bundle, rank: int, tag: int, device: torch.device) -> list[Handle]:
    """Start sending; wait for the handles.

    Args:
        device: of the stage that sends. What lies on the CPU although this does not is received there too.

    Raises:
        ExecutionError: something in it can't be pickled.
    """
    layouts = {number: _Layout.of(tensor, device) for number, tensor in bundle.values.items()}
    small = {
        number: layouts[number].content(tensor)
        for number, tensor in bundle.values.items()
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _SMALL
    }
    try:
        data = pickle.dumps((bundle.with_values({}), layouts, small), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises what __reduce__ raises
        raise ExecutionError(
            f"what a stage hands on can't be sent to another process ({type(error).__name__}: {error}): give "
            "the model arguments that can be pickled"
        ) from error
    head = bytearray(_HEAD)
    head[:_LENGTH] = len(data).to_bytes(_LENGTH, "little")
    head[_LENGTH : _LENGTH + len(data)] = data[: _HEAD - _LENGTH]
    handles = [comm.send(torch.frombuffer(head, dtype=torch.uint8), rank, tag)]
    if rest := bytearray(data[_HEAD - _LENGTH :]):
        handles.append(comm.send(torch.frombuffer(rest, dtype=torch.uint8), rank, tag))
    handles += [
        comm.send(layouts[number].packed(tensor), rank, tag)
        for number, tensor in bundle.values.items()
        if number not in small
    ]
    return handles


def receive_bundle(comm: Comm, rank: int, tag: int, device: torch.device, handles: list[Handle]) -> Bundle:
    """Wait for the description of the message, and start receiving its tensors.

    Args:
        device: where the tensors are allocated, but for those that are to lie on the CPU.
        handles: gets the handles to wait for before the tensors may be read.
    """
    head = bytearray(_HEAD)
    comm.recv(torch.frombuffer(head, dtype=torch.uint8), rank, tag).wait()
    length = int.from_bytes(head[:_LENGTH], "little")
    message = head[_LENGTH : _LENGTH + length]
    if rest := bytearray(length - len(message)):
        comm.recv(torch.frombuffer(rest, dtype=torch.uint8), rank, tag).wait()
        message += rest
    bundle: Bundle
    layouts: Mapping[int, _Layout]
    small: Mapping[int, bytes]
    bundle, layouts, small = pickle.loads(message)
    values: dict[int, Tensor] = {}
    for number, layout in layouts.items():
        if number in small:
            values[number] = layout.filled(small[number], device)
            continue
        values[number] = tensor = layout.empty(device)
        handles.append(_TensorReceive(comm.recv(layout.packed(tensor), rank, tag), layout, tensor))
    return bundle.with_values(values)


@dataclass
class _Layout:
    """How a tensor lies in memory, and what else its receiver must know of it.

    Expanded dimensions are sent once, and gaps are left out. The received tensor has the same strides as the
    one that was sent, and begins as many elements behind an aligned address: the last bits of a matrix
    product depend on both.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    offset: int
    on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> _Layout:
        on_host = tensor.is_cpu and device.type != "cpu"
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.requires_grad, misaligned(tensor), on_host)

    def empty(self, device: torch.device) -> Tensor:
        there = _CPU if self.on_host else device
        return empty_strided_at(self.offset, self.shape, self.stride, self.dtype, there)

    def packed(self, tensor: Tensor) -> Tensor:
        """A view of the elements to send: each once, in the order in which they lie in memory."""
        tensor = tensor.detach()
        for dim, stride in enumerate(self.stride):
            if stride == 0 and self.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        order = sorted(range(tensor.dim()), key=lambda dim: -self.stride[dim])
        return tensor.permute(order)

    def content(self, tensor: Tensor) -> bytes:
        """The elements to send, as bytes."""
        values = self.packed(tensor).resolve_conj().resolve_neg()
        # A copy in any case: one value that was expanded counts as contiguous, and has a stride of 0.
        flat = values.clone(memory_format=torch.contiguous_format).flatten()
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""

    def filled(self, content: bytes, device: torch.device) -> Tensor:
        """Return a tensor of that `content`."""
        tensor = self.empty(_CPU)
        if content:
            packed = self.packed(tensor)
            elements = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(self.dtype)
            packed.copy_(elements.view(packed.shape))
        return tensor.to(_CPU if self.on_host else device).requires_grad_(self.requires_grad)


@dataclass(eq=False, repr=False)
class _TensorReceive:
    """The `Handle` of a tensor that is being received."""

    handle: Handle
    layout: _Layout
    tensor: Tensor

    def wait(self) -> None:
        self.handle.wait()
        self.tensor.requires_grad_(self.layout.requires_grad)
