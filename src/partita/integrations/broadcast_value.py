"""What one rank has, such as a model's output, to all ranks: tensors as tensors, the rest as a pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita.errors import ExecutionError
from partita.runtime import Comm
from partita.runtime.publish_errors import publish_errors

__all__ = ["broadcast_value"]


def broadcast_value(comm: Comm, value: Any, src: int, device: torch.device) -> Any:
    """Return ``value`` of rank ``src`` on every rank. Collective.

    Args:
        value: anything that can be pickled, with tensors anywhere in it; ignored on the other ranks.
        device: where this rank gets its tensors.

    Raises:
        ExecutionError: a value that can't be pickled.

    >>> from partita.runtime import InProcessWorld
    >>> def run(comm):
    ...     return broadcast_value(comm, {"x": torch.tensor([comm.rank])}, 1, torch.device("cpu"))
    >>> InProcessWorld(2).run(run)
    [{'x': tensor([1])}, {'x': tensor([1])}]
    """
    own: list[Tensor] = []
    with publish_errors(comm, "sharing a value"):
        written = _written(value, own) if comm.rank == src else None
        structure, described = comm.all_gather_object(written)[src]
        if comm.rank == src:
            tensors = [tensor.detach().contiguous() for tensor in own]
        else:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in described]
        for tensor in tensors:
            if tensor.numel():
                comm.broadcast(tensor, src).wait()
    return value if comm.rank == src else _Reader(structure, tensors).load()


def _written(value: Any, tensors: list[Tensor]) -> tuple[bytes, list[tuple[torch.Size, torch.dtype]]]:
    buffer = io.BytesIO()
    try:
        _Writer(buffer, tensors).dump(value)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ExecutionError(
            f"the {type(value).__name__} that the model returns can't be pickled ({error}), so it can't go "
            "to other processes: return tensors and plain values, or leave it on the last process"
        ) from error
    return buffer.getvalue(), [(tensor.shape, tensor.dtype) for tensor in tensors]


class _Writer(pickle.Pickler):
    """Leaves tensors out, and notes them in order."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor."""
        if not isinstance(obj, Tensor):
            return None
        for number, tensor in enumerate(self._tensors):
            if tensor is obj:
                return number
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        """The tensor of that number."""
        return self._tensors[number]
