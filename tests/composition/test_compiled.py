"""Stages under ``torch.compile``: no graph breaks, and the bits of the uncut model."""

from __future__ import annotations

import copy
import pickle
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.pipelining.models import NORMED, PLAIN, SKIP, TRANSFORMER, WIDTH, Case
from tests.pipelining.running import Record, assert_equal, assert_same, cut, train, uncut
from tests.runtime import worlds
from tests.runtime.worlds import patience
from torch import Tensor, nn
from torch._dynamo.utils import counters

from partita.pipelining import Pipe, Schedule1F1B, ScheduleGPipe, get_schedule_class
from partita.pipelining.schedules import PipelineSchedule
from partita.planning import loop_placement
from partita.runtime import Comm, InProcessWorld

STAGES = 2
DROPS = Case(
    "drops", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
)


def _compiled(case: Case, kind: type[PipelineSchedule], **how: Any) -> list[Record]:
    pipe = cut(case, STAGES)

    def body(comm: Comm) -> Record:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        module, record = stage.module, Record()
        stage.module = torch.compile(module, fullgraph=True, **how)
        train(kind(stage, 4, case.loss), [module], case, record)
        return record

    return InProcessWorld(STAGES).run(body)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(TRANSFORMER, Schedule1F1B), (NORMED, ScheduleGPipe)],
    ids=["dropout and a tied parameter", "batch norm"],
)
def test_compiled_stages_equal_the_uncut_model_bit_for_bit(case: Case, kind: type[PipelineSchedule]) -> None:
    assert_same(_compiled(case, kind, backend="aot_eager"), uncut(case))


def test_stages_that_inductor_compiled_equal_the_uncut_model() -> None:
    """Its kernels round otherwise."""
    expected = uncut(PLAIN)
    for record in _compiled(PLAIN, Schedule1F1B):
        for name, gradient in record.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)


def test_inductors_random_numbers_are_the_same_in_every_run() -> None:
    """They are its own, not those of the uncut model, but follow the seed, the step and the microbatch."""
    pipe = cut(DROPS, 1)
    args, _, target = DROPS.data(8)

    def runs(comm: Comm) -> list[list[Tensor]]:
        stage = copy.deepcopy(pipe).build_stage(0, comm=comm)
        stage.module = torch.compile(stage.module, fullgraph=True)
        found: list[list[Tensor]] = [[], [], []]
        for seed, losses in zip((0, 0, 1), found, strict=True):
            torch.rand(3)
            Schedule1F1B(stage, 4, DROPS.loss, seed=seed).step(*args, target=target, losses=losses)
        return found

    first, again, other = InProcessWorld(1).run(runs)[0]
    assert_equal(first, again)
    assert all(not torch.equal(*pair) for pair in zip(first, other, strict=True))


# --- between processes --------------------------------------------------------

BY_NAME = {case.name: case for case in (TRANSFORMER, SKIP)}
PLACEMENTS = {"1F1B": (0, 1), "InterleavedZeroBubble": loop_placement(4, 2)}
RUNS = [("1F1B", "transformer"), ("InterleavedZeroBubble", "skip")]


def _in_process(comm: Comm, pipe: Pipe, kind: str, name: str) -> Record:
    held = [index for index, rank in enumerate(PLACEMENTS[kind]) if rank == comm.rank]
    stages = [copy.deepcopy(pipe).build_stage(index, comm=comm) for index in held]
    modules, record = [stage.module for stage in stages], Record()
    for stage in stages:
        stage.module = torch.compile(stage.module, backend="aot_eager", fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    train(get_schedule_class(kind)(stages, 4, BY_NAME[name].loss), modules, BY_NAME[name], record)
    assert counters["stats"]["unique_graphs"] - before >= len(held)
    return record


def _body(comm: Comm, pickled: bytes) -> bytes:
    torch.set_num_threads(1)
    pipes = pickle.loads(pickled)
    return pickle.dumps({run: _in_process(comm, pipes[run], *run) for run in RUNS})


@pytest.fixture(scope="module")
def by_rank() -> list[dict[tuple[str, str], Record]]:
    """What each of two processes found, run by run."""
    pipes = {(kind, name): cut(BY_NAME[name], len(PLACEMENTS[kind])) for kind, name in RUNS}
    with patience(100.0):  # compiling takes its time
        return [pickle.loads(found) for found in worlds.ProcessWorld(2).run(_body, pickle.dumps(pipes))]


@lru_cache
def _expected(name: str) -> Record:
    return uncut(BY_NAME[name])


@pytest.mark.dear
@pytest.mark.parametrize(("kind", "name"), RUNS, ids=[" ".join(run) for run in RUNS])
def test_compiled_stages_in_processes_equal_the_uncut_model_bit_for_bit(
    kind: str, name: str, by_rank: list[dict[tuple[str, str], Record]]
) -> None:
    assert_same([found[kind, name] for found in by_rank], _expected(name))
