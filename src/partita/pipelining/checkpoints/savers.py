"""Who saves a checkpoint together, how they tell each other what they hold, and who writes."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from partita.pipelining.checkpoints.checkpoint_source import quiet_alone, reason
from partita.pipelining.stages.held_state import Stages, listed_stages
from partita.pipelining.stages.stage import Stage
from partita.runtime import InProcessComm

__all__ = ["Savers", "savers_of"]


class Savers(Protocol):
    """The ranks that write one checkpoint.

    Attributes:
        rank: this one, as a sharded tensor's mesh counts.
        first: whether this is the first of them.
        named: whether messages say which rank they are about.
    """

    rank: int
    first: bool
    named: bool

    def everywhere(self, value: Any) -> list[Any]:
        """All ranks' objects, in order. Collective."""

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        """Write what each rank brings. Collective; raises what torch raises."""


def savers_of(stages: Stages, group: dist.ProcessGroup | None) -> Savers:
    """The ranks of the `InProcessWorld` that ``stages`` run in, or of the process group; this process alone
    where there is neither.
    """
    comms = (stage.comm for stage in listed_stages(stages) if isinstance(stage, Stage))
    comm = next((comm for comm in comms if isinstance(comm, InProcessComm) and not comm.is_over), None)
    if comm is not None:
        return _Threads(comm)
    if dist.is_available() and dist.is_initialized():
        return _Processes(group)
    return _Alone()


class _Alone:
    rank, first, named = 0, True, False

    def everywhere(self, value: Any) -> list[Any]:
        return [value]

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        with quiet_alone():
            save(nested, storage_writer=writer, no_dist=True)


class _Processes:
    """Each writes its own part."""

    named = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank()
        self.first = dist.get_rank(group) == 0

    def everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        save(nested, storage_writer=writer, process_group=self._group)


class _Threads:
    """The ranks of one process: rank 0 writes for all."""

    named = True

    def __init__(self, comm: InProcessComm) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.first = comm.rank == 0

    def everywhere(self, value: Any) -> list[Any]:
        return self._comm.all_gather_object(value)

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        text = None
        if self.first:
            for rank in range(1, self._comm.size):
                _merge(nested, self._comm.recv_object(rank))
            try:
                _Alone().write(nested, writer)
            except (Exception, CheckpointException) as error:  # told to the others, who wait for it
                text = reason(error)
        else:
            self._comm.send_object(nested, 0)
        text = self.everywhere(text)[0]
        if text is not None:
            raise RuntimeError(text)


def _merge(nested: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and name in nested:
            nested[name].update(value)
        else:
            nested[name] = value
