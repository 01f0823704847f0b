"""Ranks as processes over gloo: equal to the uncut model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tests.pipelining.models import NORMED, OUTPUTS, TRANSFORMER, Case
from tests.pipelining.running import Record, assert_same, cut, train, uncut
from tests.runtime.worlds import Ending, endings
from torch import Tensor

from partita.errors import ScheduleError, SignatureMismatch
from partita.pipelining import Schedule1F1B, get_schedule_class, pipeline
from partita.runtime import Comm

BY_NAME = {case.name: case for case in (TRANSFORMER, NORMED, OUTPUTS)}


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


def _results(ends: list[Ending]) -> list[Any]:
    for ending in ends:
        assert ending.error is None, ending.text
    return [ending.result for ending in ends]


@pytest.mark.parametrize(
    ("ranks", "kind", "cases"),
    [(2, "1F1B", (TRANSFORMER, NORMED)), (3, "GPipe", (TRANSFORMER, OUTPUTS))],
    ids=["2 ranks", "3 ranks"],
)
def test_processes_equal_the_uncut_model(ranks: int, kind: str, cases: tuple[Case, ...]) -> None:
    results = _results(endings(ranks, _train, tuple(case.name for case in cases), kind))
    by_rank: list[list[Record]] = [pickle.loads(records) for records in results]
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


def _corrected(comm: Comm) -> tuple[list[str], list[float]]:
    torch.set_num_threads(1)
    stage = cut(TRANSFORMER, comm.size).build_stage(comm.rank)  # a schedule connects it by itself
    refused = []
    for microbatches in (4 * (1 - comm.rank), 0, 2 + comm.rank):
        try:
            Schedule1F1B(stage, microbatches, TRANSFORMER.loss)
        except (ScheduleError, SignatureMismatch) as error:
            refused.append(f"{type(error).__name__}: {error}")
    args, _, target = TRANSFORMER.data(8)
    losses: list[Tensor] = []
    schedule = Schedule1F1B(stage, 4, TRANSFORMER.loss)
    schedule.step(*args, target=target, losses=losses)
    schedule.close()
    return refused, [loss.item() for loss in losses]


def test_what_ranks_were_not_given_alike_is_named_on_all_and_can_be_corrected() -> None:
    (first, _), (second, losses) = _results(endings(2, _corrected))
    assert first == second
    assert [text.split(",")[0] for text in first] == [
        "SignatureMismatch: n_microbatches is 4 on rank 0 and 0 on rank 1: make them equal",
        "ScheduleError: n_microbatches is 0: give a whole number of at least 1",
        "SignatureMismatch: n_microbatches is 2 on rank 0 and 3 on rank 1: make them equal",
    ]
    assert len(losses) == 4


def test_every_rank_uses_the_plan_that_rank_0_measured() -> None:
    (first, nothing), (second, losses) = _results(endings(2, _planned))
    assert first == second
    assert nothing == []
    assert len(losses) == 4
