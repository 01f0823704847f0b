"""Writes a ``torch.distributed.checkpoint`` directory from several ranks as torch's ``save`` does, but over a
comm: where a rank dies meanwhile, all others raise an error at once.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from partita._torch.distributed.groups import world_number
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.comms.group_or_comm import check_group

__all__ = ["comm_of_group", "save_together"]

T = TypeVar("T")
_comms: dict[tuple[int, bool, tuple[int, ...]], ProcessGroupComm] = {}


def comm_of_group(group: dist.ProcessGroup | None, *, beside_training: bool = False) -> Comm:
    """The comm for checkpoints of a process group, made once for all of them. Collective.

    Args:
        beside_training: another one, for the thread that writes while training goes on.
    """
    check_group(group, "process_group")
    world = world_number()
    for old in [key for key in _comms if key[0] != world]:  # torch.distributed was initialised again
        _comms.pop(old).close()
    key = world, beside_training, tuple(dist.get_process_group_ranks(group))
    if key in _comms and _comms[key].has_failed:
        _comms.pop(key).close()
    if key not in _comms:
        _comms[key] = ProcessGroupComm.from_group(group)
    return _comms[key]


def save_together(comm: Comm, state: dict[str, Any], writer: FileSystemWriter) -> None:
    """Write the states of all ranks. Collective.

    Raises:
        CheckpointException: writing failed; the same on all ranks, with the error of each.
        PeerFailed: a rank failed elsewhere, or died.
    """
    is_first = comm.rank == 0
    planner = DefaultSavePlanner()

    def plan() -> Any:
        planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = _on_each_rank(comm, "planning", plan)
    shared: list[Any] = []

    def plan_for_all() -> Any:
        if not is_first:
            return None
        global_plans, metadata = planner.create_global_plan(plans)
        shared.append(metadata)
        return writer.prepare_global_plan(global_plans)

    mine = _on_each_rank(comm, "planning for all", plan_for_all)[0][comm.rank]

    def write() -> Any:
        return writer.write_data(planner.finish_plan(mine), planner).wait()

    results = _on_each_rank(comm, "writing", write)

    def finish() -> None:
        if is_first:
            writer.finish(metadata=shared[0], results=results)

    _on_each_rank(comm, "finishing", finish)


def _on_each_rank(comm: Comm, step: str, action: Callable[[], T]) -> list[T]:
    """What ``action`` returns on each rank; an error on all of them where it raises on one."""
    result, problem = None, None
    try:
        result = action()
    except Exception as error:
        problem = (_sendable(error), _without_code(traceback.extract_tb(error.__traceback__)))
    gathered = comm.all_gather_object((result, problem))
    failures = {rank: problem for rank, (_, problem) in enumerate(gathered) if problem is not None}
    if failures:
        raise CheckpointException(step, failures)
    return [result for result, _ in gathered]


def _without_code(trace: traceback.StackSummary) -> traceback.StackSummary:
    """From Python 3.13 on a frame's summary holds its code, which can't be sent."""
    return traceback.StackSummary.from_list(
        [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in trace]
    )


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error
