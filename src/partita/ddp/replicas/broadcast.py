"""Parameters and buffers as they are on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

import torch

from partita._torch.tensors.subclasses import innermost_tensors
from partita._torch.tensors.versions import same_versions, times_written
from partita.errors import SignatureMismatch
from partita.runtime import Comm

__all__ = ["StateBroadcast", "check_equal", "difference_from_rank_0"]


class StateBroadcast:
    """Overwrites tensors with those of rank 0; tensors of one kind travel together.

    Args:
        tensors: the same kinds, in the same order, on every rank; of wrappers (quantised weights, shards of
            a DTensor) what they wrap.
        unseen: autograd does not hear of it, as it does not hear of what batch normalisation does to its
            statistics, so that a graph which has been made may still run backward.
    """

    def __init__(self, comm: Comm, tensors: Sequence[torch.Tensor], *, unseen: bool = False) -> None:
        self._comm = comm
        self._unseen = unseen
        self._kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._received: list[tuple[list[torch.Tensor], torch.Tensor, list[int]]] = []
        for tensor in chain.from_iterable(map(innermost_tensors, tensors)):
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
                under_way.append((tensors, flat, self._comm.broadcast(flat, 0)))

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


def check_equal(comm: Comm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors with those of rank 0. Collective.

    Raises:
        SignatureMismatch: values differ; names the first that does; on every rank.
    """
    difference = difference_from_rank_0(comm, tensors)
    if difference is not None:
        raise SignatureMismatch(
            f"{difference}: load the same checkpoint on all ranks, or on rank 0 before replicate(..., "
            "initial='broadcast')"
        )


def difference_from_rank_0(comm: Comm, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first tensor that is not equal to rank 0's, in words, the same on every rank; None where all
    are equal. One after the other is sent, so it takes no more memory than the largest. Collective.
    """
    own: list[tuple[str, str]] = []
    with torch.no_grad():
        parts = [(name, part) for name, whole in tensors.items() for part in innermost_tensors(whole)]
        for name, tensor in parts:
            if not tensor.numel():
                continue
            flat = tensor.detach().reshape(-1)
            of_rank_0 = flat.clone()
            comm.broadcast(of_rank_0, 0).wait()
            unequal = (flat != of_rank_0) & ~(flat.isnan() & of_rank_0.isnan())
            count = int(unequal.sum())
            if count:
                own.append((name, f"{count} of its {flat.numel()} numbers differ"))
    for rank, differing in enumerate(comm.all_gather_object(own)):
        if differing:
            name, where = differing[0]
            more = f", and {len(differing) - 1} more such tensors" if len(differing) > 1 else ""
            return f"{name!r} of rank {rank} has other values than that of rank 0 ({where}{more})"
    return None


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
