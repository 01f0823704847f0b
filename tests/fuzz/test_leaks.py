"""Thousands of steps leave nothing behind: no memory, descriptor, thread, file or shared memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.worlds import endings, patience
from torch import nn
from torch.nn import functional

from partita.ddp import replicate
from partita.pipelining import PipelineStage, Schedule1F1B, get_schedule_class
from partita.runtime import Comm

LONG = bool(os.environ.get("PARTITA_FUZZ_EXAMPLES"))
SETTLED, STEPS = (800, 6000) if LONG else (50, 100)
"""After how many steps is counted what is there, and again."""
REMADE = (2, 6)
"""The same for what is made anew in each step, and connects the ranks each time."""
MOST_BYTES = 1_000_000
COUNTED = ("descriptors", "threads", "python threads", "shared memory")

PLACEMENTS = {
    "GPipe": (0, 1),
    "1F1B": (0, 1),
    "LoopedBFS": (0, 1, 0, 1),
    "Interleaved1F1B": (0, 1, 0, 1),
    "InterleavedZeroBubble": (0, 1, 0, 1),
    "ZBVZeroBubble": (0, 1, 1, 0),
    "DualPipeV": (0, 1, 1, 0),
}
SCHEDULES = sorted(PLACEMENTS) if LONG else ["ZBVZeroBubble"]


def _there() -> dict[str, int]:
    for _ in range(2):  # one leaves tuples of tuples of numbers among its objects, the next does not
        gc.collect()
    objects = len(gc.get_objects())  # first: of the list's megabytes not all go back to the system
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "shared memory": sum(f"_{os.getpid()}_" in name for name in os.listdir("/dev/shm")),
        "objects": objects,
    }


def _more(step: Callable[[], object], settled: int = SETTLED, steps: int = STEPS) -> dict[str, int]:
    """What is there after the last step and was not when it had settled."""
    before: dict[str, int] = {}
    for number in range(steps):
        if number == settled:
            _there()  # malloc treats the first list in another way than those after it
            before = _there()
        step()
    return {name: count - before[name] for name, count in _there().items()}


def _pipeline(comm: Comm, kind: str) -> dict[str, int]:
    torch.set_num_threads(1)
    placement = PLACEMENTS[kind]
    stages = [
        PipelineStage(nn.Linear(4, 4), index, len(placement), torch.device("cpu"), comm=comm)
        for index, rank in enumerate(placement)
        if rank == comm.rank
    ]
    schedule: Any = get_schedule_class(kind)(stages, 4, functional.mse_loss)
    batch = torch.randn(8, 4)
    args = (batch,) if placement[0] == comm.rank else ()
    return _more(lambda: schedule.step(*args, target=batch))


def _replica(comm: Comm, kind: str) -> dict[str, int]:
    torch.set_num_threads(1)
    replica: Any = replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), comm, inner="aot_eager")
    run: Any = torch.compile(replica, backend="partita_ddp") if kind == "compiled" else replica
    batch = torch.randn(8, 4)
    return _more(lambda: run(batch).sum().backward())


def _schedules(comm: Comm) -> dict[str, int]:
    torch.set_num_threads(1)
    stage = PipelineStage(nn.Linear(4, 4), comm.rank, comm.size, torch.device("cpu"))
    batch = torch.randn(8, 4)
    return _more(lambda: Schedule1F1B(stage, 4, functional.mse_loss).step(batch, target=batch), *REMADE)


def _replicas(_: Comm) -> dict[str, int]:
    def remake() -> None:
        replicate(nn.Linear(4, 4), inner="aot_eager")
        gc.collect()  # a replicated module and its hooks hold each other

    return _more(remake, *REMADE)


def _assert_nothing(found: list[Any]) -> None:
    for ending in found:
        assert ending.error is None, ending.text
        more = dict(ending.result)
        if LONG:
            assert more["bytes"] < MOST_BYTES, more
            assert more["objects"] < 100, more
        assert all(more[name] <= 0 for name in COUNTED), more


@pytest.fixture(autouse=True)
def _short_flight_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a record of the last 2,000 collectives, which replicas fill after the count has begun."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_steps_of_a_pipeline_leave_nothing(kind: str) -> None:
    with patience(350.0):
        _assert_nothing(endings(2, _pipeline, kind))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["eager", pytest.param("compiled", marks=pytest.mark.dear)])
def test_steps_of_replicas_leave_nothing(kind: str) -> None:
    with patience(350.0):
        _assert_nothing(endings(2, _replica, kind))


@pytest.mark.parametrize("remade", [_schedules, _replicas])
def test_what_is_made_anew_and_never_closed_leaves_nothing(remade: Callable[[Comm], dict[str, int]]) -> None:
    for ending in endings(2, remade):
        assert ending.error is None, ending.text
        assert all(ending.result[name] <= 0 for name in COUNTED), ending.result
