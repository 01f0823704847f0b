"""Pipelines over groups that behave like NCCL's: messages of a pair arrive in the order in which they were
sent, whatever their tags.
"""

from __future__ import annotations

import copy
import pickle
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.pipelining.models import SKIP, TRANSFORMER, Case
from tests.pipelining.running import Record, assert_same, cut, train, uncut
from tests.runtime.nccl_like import NcclLike, NcclLikeWorld

from partita.pipelining import Pipe, get_schedule_class
from partita.planning import loop_placement, v_placement
from partita.runtime import Comm

LOOP, V = loop_placement(4, 2), v_placement(4, 2)
PLACEMENTS = {
    "1F1B": (0, 1, 2),
    "Interleaved1F1B": LOOP,
    "InterleavedZeroBubble": LOOP,
    "ZBVZeroBubble": V,
    "DualPipeV": V,
}
CASES = {case.name: case for case in (TRANSFORMER, SKIP)}
RUNS = [(kind, name) for kind in PLACEMENTS for name in CASES]


def _piped(comm: Comm, pipe: Pipe, kind: str, case: Case) -> Record:
    indices = [index for index, rank in enumerate(PLACEMENTS[kind]) if rank == comm.rank]
    own = copy.deepcopy(pipe)
    stages = [own.build_stage(index, comm=comm) for index in indices]
    record = Record()
    schedule = get_schedule_class(kind)(stages, 4, case.loss)
    train(schedule, [stage.module for stage in stages], case, record)
    return record


def _body(comm: Any, pickled: bytes, ranks: int) -> bytes:
    torch.set_num_threads(1)
    pipes = pickle.loads(pickled)
    gradients = {
        run: _piped(comm, pipes[run[1]], run[0], CASES[run[1]])
        for run in RUNS
        if max(PLACEMENTS[run[0]]) + 1 == ranks
    }
    used = {name for name, group in comm._groups.by_name.items() if isinstance(group, NcclLike)}
    return pickle.dumps((gradients, used))


@pytest.fixture(scope="module")
def by_rank() -> dict[int, list[Any]]:
    """What the processes found, by their number."""
    by_ranks: dict[int, list[Any]] = {}
    for ranks, stages in ((3, 3), (2, 4)):
        pipes = {name: cut(case, stages) for name, case in CASES.items()}
        results = NcclLikeWorld(ranks).run(_body, pickle.dumps(pipes), ranks)
        by_ranks[ranks] = [pickle.loads(result) for result in results]
    return by_ranks


@lru_cache
def _expected(name: str) -> Record:
    return uncut(CASES[name])


@pytest.mark.parametrize(("kind", "name"), RUNS, ids=[" ".join(run) for run in RUNS])
def test_a_pipeline_without_tags_equals_the_uncut_model(
    kind: str, name: str, by_rank: dict[int, list[Any]]
) -> None:
    ranks = by_rank[max(PLACEMENTS[kind]) + 1]
    assert_same([records[kind, name] for records, _ in ranks], _expected(name))


def test_each_direction_has_a_communicator_of_its_own(by_rank: dict[int, list[Any]]) -> None:
    for _, used in by_rank[2]:
        assert used == {"nccl/0>1", "nccl/1>0"}
    for rank, (_, used) in enumerate(by_rank[3]):
        assert used == {
            f"nccl/{src}>{dst}" for src in range(3) for dst in range(3) if src != dst and rank in {src, dst}
        }
