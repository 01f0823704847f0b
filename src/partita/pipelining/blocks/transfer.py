"""Packets as messages: their sizes are known only when they are there.

::

    length of the description     int64[1]
    description                   uint8[length]      what all tensors look like, and what is no tensor
    tensors                       as they lie in memory

All have one tag: they arrive in order. Nobody makes room before the length is known, so a receive ends with
the posting of the last part.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from partita.errors import ExecutionError
from partita.pipelining.blocks.packet import Gradients, Packet
from partita.runtime import Comm, Handle

__all__ = ["receive_bundle", "send_bundle"]


def send_bundle(comm: Comm, bundle: Packet | Gradients, rank: int, tag: int) -> list[Handle]:
    """Start sending; wait for the handles.

    Raises:
        ExecutionError: something in it can't be pickled.
    """
    looks = {number: _Looks.of(tensor) for number, tensor in bundle.values.items()}
    try:
        data = pickle.dumps((bundle.with_values({}), looks), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises what __reduce__ raises
        raise ExecutionError(
            f"what a stage hands on can't be sent to another process ({type(error).__name__}: {error}): give "
            "the model arguments that can be pickled"
        ) from error
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    handles = [
        comm.send(torch.tensor([len(data)], dtype=torch.int64), rank, tag),
        comm.send(message, rank, tag),
    ]
    handles += [
        comm.send(looks[number].packed(tensor), rank, tag) for number, tensor in bundle.values.items()
    ]
    return handles


def receive_bundle(
    comm: Comm, rank: int, tag: int, device: torch.device, handles: list[Handle]
) -> Packet | Gradients:
    """Wait until it is known what comes, and start receiving its tensors.

    Args:
        device: where they are to lie.
        handles: gets what must be waited for before they may be read.
    """
    length = torch.empty(1, dtype=torch.int64)
    comm.recv(length, rank, tag).wait()
    message = bytearray(int(length))
    comm.recv(torch.frombuffer(message, dtype=torch.uint8), rank, tag).wait()
    bundle: Packet | Gradients
    looks: Mapping[int, _Looks]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # a structure of torch's pytree tells of its own future
        bundle, looks = pickle.loads(message)
    values: dict[int, Tensor] = {}
    for number, look in looks.items():
        room = look.empty(device)
        handles.append(_Unpacked(comm.recv(look.packed(room), rank, tag), look, room))
        values[number] = room
    return bundle.with_values(values)


class _Looks:
    """How a tensor lies in memory.

    A dimension that is expanded is sent once, and one with gaps without them; where it arrives, it has the
    strides that it had.
    """

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
    ) -> None:
        self.shape, self.stride, self.dtype, self.requires_grad = shape, stride, dtype, requires_grad

    @classmethod
    def of(cls, tensor: Tensor) -> _Looks:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """An empty tensor like that."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def packed(self, tensor: Tensor) -> Tensor:
        """The part of it that is sent: each element once, in the order of memory where that has no gaps."""
        tensor = tensor.detach()
        for dim, stride in enumerate(self.stride):
            if stride == 0 and self.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        order = sorted(range(tensor.dim()), key=lambda dim: -self.stride[dim])
        return tensor.permute(order)


class _Unpacked:
    """A handle."""

    def __init__(self, handle: Handle, look: _Looks, room: Tensor) -> None:
        self._handle, self._look, self._room = handle, look, room

    def wait(self) -> None:
        """Until it is there."""
        self._handle.wait()
        self._room.requires_grad_(self._look.requires_grad)
