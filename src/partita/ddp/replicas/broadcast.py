"""Parameters and buffers as they are on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from partita._torch.tensors.tensor_text import short_name
from partita._torch.tensors.versions import same_versions, times_written
from partita.errors import SignatureMismatch
from partita.runtime import Comm

__all__ = ["StateBroadcast"]


class StateBroadcast:
    """Overwrites tensors with those of rank 0; tensors of one kind travel together.

    Args:
        tensors: the same kinds, in the same order, on every rank.
        unseen: autograd does not hear of it, as it does not hear of what batch normalisation does to its
            statistics, so that a graph which has been made may still run backward.
    """

    def __init__(self, comm: Comm, tensors: Sequence[torch.Tensor], *, unseen: bool = False) -> None:
        self._comm = comm
        self._unseen = unseen
        self._kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._received: list[tuple[list[torch.Tensor], torch.Tensor, list[int]]] = []
        for tensor in tensors:
            if tensor.numel():
                self._kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)

    def run(self) -> None:
        """Overwrite the tensors of all ranks with those of rank 0. Collective."""
        self.start()()
        self.overwrite()

    def start(self) -> Callable[[], None]:
        """Start a broadcast, whose values are kept beside the tensors. Collective.

        Returns:
            What waits for it.
        """
        self.forget()
        if self._comm.size == 1:
            return self.forget
        under_way = []
        with torch.no_grad():
            for tensors in self._kinds.values():
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
                under_way.append((tensors, flat, self._comm.broadcast(_as_numbers(flat), 0)))

        def wait() -> None:
            for tensors, flat, handle in under_way:
                handle.wait()
                if self._comm.rank != 0:
                    self._received.append((tensors, flat, [times_written(tensor) for tensor in tensors]))

        return wait

    def overwrite(self) -> None:
        """Overwrite the tensors with what was received, where nobody has written to them since. Not
        collective.
        """
        received, self._received = self._received, []
        with torch.no_grad():
            for tensors, flat, writes in received:
                if writes == [times_written(tensor) for tensor in tensors]:
                    with same_versions(tensors) if self._unseen else nullcontext():
                        _unpack(flat, tensors)

    def forget(self) -> None:
        """Drop what was received."""
        self._received = []

    def check(self, names: Sequence[str]) -> None:
        """Compare with rank 0. Collective.

        Args:
            names: for the message; unused where all are equal.

        Raises:
            SignatureMismatch: values differ; on every rank.
        """
        wrong = None
        with torch.no_grad():
            for (dtype, _), tensors in self._kinds.items():
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
                other = flat.clone()
                self._comm.broadcast(_as_numbers(other), 0).wait()
                if not torch.equal(flat, other) and wrong is None:
                    wrong = short_name(dtype)
        for rank, dtype_name in enumerate(self._comm.all_gather_object(wrong)):
            if dtype_name is not None:
                raise SignatureMismatch(
                    f"parameters or buffers ({dtype_name}, {len(names)} in all) of rank {rank} have other "
                    "values than those of rank 0: load the same checkpoint on all ranks, or on rank 0 before "
                    "replicate(..., initial='broadcast')"
                )


def _as_numbers(flat: torch.Tensor) -> torch.Tensor:
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
