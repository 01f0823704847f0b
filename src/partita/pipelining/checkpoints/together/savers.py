"""The ranks that save or load a checkpoint together: how they exchange objects, and how they write."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from partita.errors import ArgumentError, CheckpointError, PartitaError
from partita.pipelining.checkpoints.together.collective_save import comm_of_group, save_together
from partita.pipelining.checkpoints.together.torch_messages import be_quiet_alone, quiet_alone, reason
from partita.pipelining.checkpoints.together.writer_thread import writer_thread
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.stages.placing.state_of_stage import Stages, listed_stages
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, InProcessComm
from partita.runtime.failures.thread_activity import doing
from partita.runtime.publish_errors import publish_errors

__all__ = ["Savers", "agree", "attempt", "savers_of"]

T = TypeVar("T")
_WHERE = "saving or loading a checkpoint"
_BESIDE = "writing a snapshot"


class Savers(Protocol):
    """The ranks that write one checkpoint.

    Attributes:
        rank: the number of this rank in the world, as in a sharded tensor's mesh.
        place: its number among the ranks that save or load together.
        first: whether it is the first of them.
        named: whether error messages name the rank.
    """

    rank: int
    place: int
    first: bool
    named: bool

    def gather(self, value: Any) -> list[Any]:
        """Gather the objects of all ranks, in order. Collective."""

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        """Write the values of all ranks. Collective; raises what torch raises."""

    def start(self, staged: dict[str, Any], writer: FileSystemWriter) -> Future[Any]:
        """Write in a thread, which alone may use ``staged`` until the future is done. Collective."""


def attempt(
    action: Callable[[], T], path: str | os.PathLike[str], what: Literal["read", "written"]
) -> tuple[T | None, PartitaError | None]:
    """The result of ``action``, or its error: for `agree`, before any rank waits for another."""
    try:
        return action(), None
    except PartitaError as error:
        return None, error
    except (Exception, CheckpointException) as error:
        wrapped = CheckpointError(f"the checkpoint {os.fspath(path)!r} could not be {what}: {reason(error)}")
        wrapped.__cause__ = error
        return None, wrapped


def agree(savers: Savers, problem: PartitaError | None) -> None:
    """Raise an error on all ranks if one has a problem. Collective.

    Raises:
        CheckpointError: the problem of the first rank that has one.
    """
    problems = savers.gather(None if problem is None else str(problem))
    for rank, text in enumerate(problems):
        if text is not None:
            if not savers.named and problem is not None:
                raise problem
            raise CheckpointError(f"rank {rank}: {text}") from problem


def savers_of(stages: Stages, group: dist.ProcessGroup | None, *, alone: bool = False) -> Savers:
    """The ranks of the `InProcessWorld` that ``stages`` run in, or of the process group; this process alone
    where there is neither, or with ``alone``.

    Raises:
        ArgumentError: ``stages`` is a pipe, whose names are not the model's.
    """
    if isinstance(stages, Pipe):
        raise ArgumentError(
            "stages is a pipe, whose modules have other names than the model: give the stages that its "
            "build_stage() returned, or the whole model"
        )
    if alone:
        return _Alone()
    comms = (stage.comm for stage in listed_stages(stages) if isinstance(stage, Stage))
    comm = next((comm for comm in comms if isinstance(comm, InProcessComm) and not comm.is_over), None)
    if comm is not None:
        return _Threads(comm)
    if dist.is_available() and dist.is_initialized():
        return _Processes(group)
    return _Alone()


class _Alone:
    rank, place, first, named = 0, 0, True, False

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        with quiet_alone():
            save(nested, storage_writer=writer, no_dist=True)

    def start(self, staged: dict[str, Any], writer: FileSystemWriter) -> Future[Any]:
        be_quiet_alone()
        write = partial(save, staged, storage_writer=writer, no_dist=True)
        return writer_thread().submit(write, with_others=False)


class _Processes:
    """Each writes its own part."""

    named = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        with doing(_WHERE):
            self._comm = comm_of_group(group)
        self.rank = dist.get_rank()
        self.place = dist.get_rank(group)
        self.first = self.place == 0

    def gather(self, value: Any) -> list[Any]:
        with publish_errors(self._comm, _WHERE):
            return self._comm.all_gather_object(value)

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        _write(self._comm, _WHERE, nested, writer)

    def start(self, staged: dict[str, Any], writer: FileSystemWriter) -> Future[Any]:
        with doing(_BESIDE):
            comm = comm_of_group(self._group, beside_training=True)
        return writer_thread().submit(partial(_write, comm, _BESIDE, staged, writer), with_others=True)


def _write(comm: Comm, where: str, nested: dict[str, Any], writer: FileSystemWriter) -> None:
    with publish_errors(comm, where, (CheckpointException,)):
        save_together(comm, nested, writer)


class _Threads:
    """The ranks of an `InProcessWorld`: rank 0 writes for all."""

    named = True

    def __init__(self, comm: InProcessComm) -> None:
        self._comm = comm
        self.rank = self.place = comm.rank
        self.first = comm.rank == 0

    def gather(self, value: Any) -> list[Any]:
        return self._comm.all_gather_object(value)

    def write(self, nested: dict[str, Any], writer: FileSystemWriter) -> None:
        text = None
        if self.first:
            self._collect(nested)
            try:
                _Alone().write(nested, writer)
            except (Exception, CheckpointException) as error:  # sent to the others, which wait for it
                text = reason(error)
        else:
            self._comm.send_object(nested, 0)
        text = self.gather(text)[0]
        if text is not None:
            raise RuntimeError(text)

    def start(self, staged: dict[str, Any], writer: FileSystemWriter) -> Future[Any]:
        if self.first:
            self._collect(staged)
            return _Alone().start(staged, writer)
        self._comm.send_object(staged, 0)
        nothing: Future[Any] = Future()
        nothing.set_result(None)
        return nothing

    def _collect(self, nested: dict[str, Any]) -> None:
        for rank in range(1, self._comm.size):
            _merge(nested, self._comm.recv_object(rank))


def _merge(nested: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and name in nested:
            nested[name].update(value)
        else:
            nested[name] = value
