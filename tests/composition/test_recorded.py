"""Pieces that are recorded as CUDA graphs, in processes: buckets of a data parallel backward pass, and stages
of a pipeline.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import AllWorthIt
from tests.ddp import models
from tests.ddp.models import batch, loss_of, seeded
from tests.ddp.scenarios import TINY_MB, ordinary
from tests.ddp.scenarios import assert_same as assert_same_gradients
from tests.pipelining.models import TRANSFORMER
from tests.pipelining.running import STEPS, Record, assert_same, cut, train, uncut
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from partita.cudagraphs import CudaGraphsRunner
from partita.ddp import partita_ddp, replicate
from partita.pipelining import Schedule1F1B, UncutReference, get_schedule_class, pipeline
from partita.planning import get_schedule, v_placement
from partita.runtime import Comm, InProcessWorld


def recording(**options: Any) -> CudaGraphsRunner:
    return CudaGraphsRunner(recorder="replay", saving=AllWorthIt(), **options)


def counts(runner: CudaGraphsRunner, name: str) -> dict[str, int]:
    """Of the regions of each kind of graph."""
    found: dict[str, int] = {}
    for graph in runner.graphs:
        for info in graph.cache_info().values():
            found[graph.kind] = found.get(graph.kind, 0) + getattr(info, name)
    return found


def accumulating(module: Any, rank: int) -> list[Any]:
    """Two backward passes a step, the first of which stays on its rank."""
    seen: list[Any] = []
    inside = getattr(module, "_orig_mod", module)
    for step in range(4):
        inside.zero_grad()
        with inside.no_sync():
            loss_of(module(batch(step, rank))).backward()
        loss_of(module(batch(step + 50, rank))).backward()
        seen += [p.grad.clone() for p in inside.parameters()]
    return seen


CASES = {
    "blocks": (lambda: models.mlp(12), ordinary),
    "no_sync": (models.mlp, accumulating),
    "graph break": (models.Broken, ordinary),
}


def _data_parallel(comm: Comm) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, (make, how) in CASES.items():
        torch.compiler.reset()
        expected = how(DistributedDataParallel(seeded(make), bucket_cap_mb=1), comm.rank)
        runner = recording()
        module: Any = replicate(seeded(make), bucket_cap_mb=TINY_MB, inner=runner)
        run = torch.compile(module, backend=partita_ddp)
        assert_same_gradients(expected, how(run, comm.rank))
        found[name] = {
            "buckets": len(module.replication.reducer.buckets),
            "graphs": len(runner.graphs),
            "hits": counts(runner, "hits"),
            "overtaken": counts(runner, "overtaken"),
            "gave up": [info.gave_up for graph in runner.graphs for info in graph.cache_info().values()],
        }
        module.replication.close()
    return found


def test_recorded_buckets_of_a_backward_pass_give_the_gradients_of_torchs_ddp() -> None:
    for found in ProcessWorld(2).run(_data_parallel):
        for name, case in found.items():
            assert case["buckets"] > 1
            assert case["graphs"] > 2, "the backward graph is in pieces"
            assert case["hits"]["piece"] >= 2 * (case["graphs"] - 1), (name, case)
            assert not any(case["gave up"]), (name, case)
        assert found["blocks"]["overtaken"] == {"piece": 0}


def _stages(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    case = TRANSFORMER
    stage = copy.deepcopy(cut(case, comm.size)).build_stage(comm.rank, comm=comm)
    runner, module, record = recording(), stage.module, Record()
    stage.module = runner.for_module(module)
    train(Schedule1F1B(stage, 4, case.loss), [module], case, record)
    return pickle.dumps((record, counts(runner, "hits")))


@pytest.mark.dear
def test_recorded_stages_in_processes_equal_the_uncut_model() -> None:
    found = [pickle.loads(data) for data in ProcessWorld(2).run(_stages)]
    assert_same([record for record, _ in found], uncut(TRANSFORMER))
    (_, of_embedding), (_, of_blocks) = found
    assert of_embedding["forward"] > 0
    assert min(of_blocks[kind] for kind in ("forward", "backward")) > 4 * STEPS


def _halves(comm: Comm) -> tuple[Record, dict[str, int], int]:
    case, own = TRANSFORMER, [index for index, rank in enumerate(v_placement(4, 2)) if rank == comm.rank]
    pipe, runner, record = copy.deepcopy(cut(case, 4)), recording(), Record()
    stages = [pipe.build_stage(index, comm=comm) for index in own]
    for stage in stages:
        stage.compile(runner)
    schedule = get_schedule_class("ZBVZeroBubble")(stages, 4, case.loss)
    train(schedule, [stage.module for stage in stages], case, record)
    return record, counts(runner, "hits"), len(runner.graphs)


def test_recorded_halves_of_a_backward_pass_equal_the_uncut_model() -> None:
    """F, I and W of each stage are recorded by themselves and replayed."""
    results = InProcessWorld(2).run(_halves)
    assert_same([record for record, _, _ in results], uncut(TRANSFORMER))
    for _, hits, graphs in results:
        assert graphs >= 2 * 3, "F, I and W of two stages"
        assert hits["piece"] > 2 * 3 * 4, "most microbatches of most steps"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


MICROBATCHES, SETTLED, STEPS_IN_ALL = 6, 8, 11


def _steps(runner: Any, parameters: Sequence[nn.Parameter], note: Callable[[], None]) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for number in range(STEPS_IN_ALL):
        generator = torch.Generator().manual_seed(number)
        x, target = (torch.randn(2 * MICROBATCHES, 8, generator=generator) for _ in range(2))
        runner.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 >= SETTLED:
            note()


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_microbatches_that_are_under_way_together_have_recordings_of_their_own(name: str) -> None:
    """What one had saved was copied, and what I leaves to W. After a few steps all is replayed."""
    ranks = 2
    torch.manual_seed(0)
    whole, mse = nn.Sequential(*(Block() for _ in range(4))), nn.functional.mse_loss
    plan = get_schedule(name)(ranks if name == "GPipe" else 4, MICROBATCHES, ranks)
    pipe = pipeline(whole, (torch.randn(2, 8),), stages=plan.stages)

    def rank(comm: Comm) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
        own = [index for index, owner in enumerate(plan.stage_ranks) if owner == comm.rank]
        runner, stages = recording(), [pipe.build_stage(index, comm=comm) for index in own]
        for stage in stages:
            stage.compile(runner)
        schedule = get_schedule_class(name)(stages if len(own) > 1 else stages[0], MICROBATCHES, mse)
        named = {key: value for stage in stages for key, value in stage.module.named_parameters()}
        counted: list[dict[str, int]] = []

        def note() -> None:
            whats = ("recorded", "uncaptured", "overtaken")
            counted.append({what: sum(counts(runner, what).values()) for what in whats})

        _steps(schedule, list(named.values()), note)
        return {key: value.detach() for key, value in named.items()}, counted

    reference = copy.deepcopy(whole)
    results = InProcessWorld(ranks).run(rank)
    _steps(UncutReference(reference, MICROBATCHES, mse), list(reference.parameters()), lambda: None)
    trained = {key: value for state, _ in results for key, value in state.items()}
    for key, value in reference.named_parameters():
        assert torch.equal(trained[key], value), key
    for _, (first, *later) in results:
        assert first["recorded"] > 0
        assert first["overtaken"] == 0
        assert later == [first] * len(later), "none is recorded or runs as it is any more"


def test_what_a_stage_receives_and_hands_on_is_not_copied() -> None:
    """The middle stage's forward pass reads where it received, and what it makes is sent from there."""
    torch.manual_seed(0)
    whole, mse = nn.Sequential(*(Block() for _ in range(3))), nn.functional.mse_loss
    pipe = pipeline(whole, (torch.randn(2, 8),), stages=3)

    def rank(comm: Comm) -> list[tuple[int, int, int]]:
        runner, stage = recording(), pipe.build_stage(comm.rank, comm=comm)
        stage.compile(runner)
        schedule = Schedule1F1B(stage, MICROBATCHES, mse)
        _steps(schedule, list(stage.module.parameters()), lambda: None)
        forward = next(graph for graph in runner.graphs if graph.plan.saved)
        (region,) = forward.regions
        entries = region._cache._entries.values()
        twin = pickle.loads(pickle.dumps(stage.module))
        assert torch.equal(twin(torch.ones(2, 8)), stage.module(torch.ones(2, 8)))
        return [(entry.slot, len(entry.buffers), len(entry.in_place._copied)) for entry in entries]

    first, middle, last = (sorted(entries) for entries in InProcessWorld(3).run(rank))
    assert [slot for slot, *_ in middle] == list(range(len(middle)))
    assert {tuple(counts) for _, *counts in first} == {(1, 0)}, "it gets microbatches of the user's batch"
    assert {tuple(counts) for _, *counts in middle} == {(0, 0)}
    assert {tuple(counts) for _, *counts in last} == {(0, 1)}, "the model's result is the user's to keep"


def test_sizes_that_take_turns_are_recorded_once() -> None:
    """What was received in another size lay at another place each time."""
    torch.manual_seed(0)
    whole, mse = nn.Sequential(*(Block() for _ in range(2))), nn.functional.mse_loss
    pipe = pipeline(whole, (torch.randn(2, 8),), stages=2)

    def rank(comm: Comm) -> list[int]:
        runner, stage = recording(), pipe.build_stage(comm.rank, comm=comm)
        stage.compile(runner)
        schedule = Schedule1F1B(stage, 4, mse)
        recorded = []
        for step in range(12):
            x = torch.ones(4 * (2 + step % 2), 8)
            schedule.step(x, target=x)
            recorded.append(sum(counts(runner, "recorded").values()))
        return recorded

    for recorded in InProcessWorld(2).run(rank):
        assert recorded[-4:] == recorded[-1:] * 4
