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
