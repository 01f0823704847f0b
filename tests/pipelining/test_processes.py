"""Ranks as processes over gloo: equal to the uncut model, and no failure of one is a hang of the others."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from tests.pipelining.models import NORMED, OUTPUTS, PLAIN, TRANSFORMER, Case
from tests.pipelining.running import Record, assert_same, cut, train, uncut
from tests.runtime.worlds import Ending, endings
from torch import Tensor

from partita.errors import PeerFailed, SignatureMismatch
from partita.pipelining import Schedule1F1B, ScheduleGPipe, get_schedule_class, pipeline
from partita.runtime import Comm

BY_NAME = {case.name: case for case in (TRANSFORMER, NORMED, OUTPUTS, PLAIN)}


def _train(comm: Comm, names: tuple[str, ...], kind: str) -> bytes:
    torch.set_num_threads(1)
    records = []
    for name in names:
        case = BY_NAME[name]
        stage = cut(case, comm.size).build_stage(comm.rank, comm=comm)
        record = Record()
        train(get_schedule_class(kind)(stage, 4, case.loss), [stage.module], case, record)
        records.append(record)
    return pickle.dumps(records)  # by value: tensors as such would travel as memory of a process that ends


def _results(found: list[Ending]) -> list[Any]:
    for ending in found:
        assert ending.error is None, ending.text
    return [ending.result for ending in found]


@pytest.mark.parametrize(
    ("ranks", "kind", "cases"),
    [(2, "1F1B", (TRANSFORMER, NORMED)), (3, "GPipe", (TRANSFORMER, OUTPUTS))],
    ids=["2 ranks", "3 ranks"],
)
def test_processes_equal_the_uncut_model(ranks: int, kind: str, cases: tuple[Case, ...]) -> None:
    found = _results(endings(ranks, _train, tuple(case.name for case in cases), kind))
    by_rank: list[list[Record]] = [pickle.loads(records) for records in found]
    for number, case in enumerate(cases):
        assert_same([records[number] for records in by_rank], uncut(case))


def _planned(comm: Comm) -> tuple[str, list[float]]:
    torch.set_num_threads(1)
    args, _, target = TRANSFORMER.data(8)
    pipe = pipeline(TRANSFORMER.model(), TRANSFORMER.data(2)[0], stages=comm.size)
    stage = pipe.build_stage(comm.rank)  # its comm comes from the default process group
    losses: list[Tensor] = []
    Schedule1F1B(stage, 4, TRANSFORMER.loss).step(*args, target=target, losses=losses)
    assert pipe.plan is not None
    return pipe.plan.to_json(), [loss.item() for loss in losses]


def test_every_rank_uses_the_plan_that_rank_0_measured() -> None:
    (first, nothing), (second, losses) = _results(endings(2, _planned))
    assert first == second
    assert nothing == []
    assert len(losses) == 4


def _fails(comm: Comm, how: str, failing: int) -> None:
    torch.set_num_threads(1)
    stage = cut(PLAIN, comm.size).build_stage(comm.rank, comm=comm)
    calls = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(calls) == 7 and comm.rank == failing:  # in the middle of the second step
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the activations are not finite")

    stage.module.register_forward_pre_hook(fail)
    schedule = ScheduleGPipe(stage, 4, PLAIN.loss)
    args, _, target = PLAIN.data(8)
    for _ in range(3):
        schedule.step(*args, target=target)


@pytest.mark.parametrize(("size", "failing"), [(2, 0), (3, 1)], ids=["first", "middle"])
def test_a_rank_that_raises_in_forward_is_named_on_every_other(size: int, failing: int) -> None:
    found = endings(size, _fails, "raise", failing)
    for rank, ending in enumerate(found):
        if rank == failing:
            assert isinstance(ending.error, ValueError)
            continue
        assert isinstance(ending.error, PeerFailed), ending
        assert ending.error.rank == failing
        assert f"rank {failing} failed in stage {failing}, microbatch 2, action {failing}F2" in str(
            ending.error
        )
        assert "the activations are not finite" in ending.error.traceback_text


@pytest.mark.parametrize(("size", "failing"), [(2, 0), (3, 1)], ids=["first", "middle"])
def test_a_rank_killed_in_the_middle_of_a_step_is_named_on_every_other(size: int, failing: int) -> None:
    found = endings(size, _fails, "kill", failing)
    assert found[failing].exitcode == -signal.SIGKILL
    for rank, ending in enumerate(found):
        if rank != failing:
            assert isinstance(ending.error, PeerFailed), ending
            assert ending.error.rank == failing
            assert f"rank {failing} died without a word" in str(ending.error)


def _disagrees(comm: Comm) -> None:
    stage = cut(PLAIN, comm.size).build_stage(comm.rank, comm=comm)
    schedule = ScheduleGPipe(stage, 4, PLAIN.loss)
    args, _, target = PLAIN.data(8)
    (schedule.step if comm.rank == 0 else schedule.eval)(*args, target=target)


def test_ranks_that_disagree_about_a_step_both_learn_of_it() -> None:
    for ending in endings(2, _disagrees):
        assert isinstance(ending.error, (SignatureMismatch, PeerFailed)), ending
        assert "step() number 0 in train mode" in str(ending.error)
        assert "eval() number 0 in train mode" in str(ending.error)
