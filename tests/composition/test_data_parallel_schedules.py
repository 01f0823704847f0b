"""Two data parallel pipelines of two ranks with several stages each.

::

    loop      first rank: stages 0 and 2    second rank: stages 1 and 3
    V         first rank: stages 0 and 3    second rank: stages 1 and 2

Each of the four is a data parallel pair with its copy in the other pipeline.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.composition.grid import MICROBATCHES, SAMPLES, Halves, Place, data, gradients, place, weights, wrap
from tests.pipelining.models import SKIP, TRANSFORMER, Case
from tests.pipelining.running import assert_equal, cut
from tests.runtime.worlds import ProcessWorld, patience
from torch import Tensor, nn

from partita.pipelining import Pipe, get_schedule_class
from partita.planning import loop_placement, v_placement
from partita.runtime import Comm

STEPS = 2
STAGES = 4
CASES = {"transformer": TRANSFORMER, "skip": SKIP}
PLACEMENTS = {
    "Interleaved1F1B": loop_placement(STAGES, 2),
    "InterleavedZeroBubble": loop_placement(STAGES, 2),
    "ZBVZeroBubble": v_placement(STAGES, 2),
    "DualPipeV": v_placement(STAGES, 2),
}
RUNS = [
    (how, kind, name)
    for how, name in (("ddp", "transformer"), ("ddp", "skip"), ("fsdp", "skip"))
    for kind in PLACEMENTS
]
RUNS += [
    (f"ddp {option}", kind, "transformer")
    for option, kind in (
        ("gradient_as_bucket_view", "Interleaved1F1B"),
        ("gradient_as_bucket_view", "ZBVZeroBubble"),
        ("find_unused_parameters", "ZBVZeroBubble"),
    )
]
"""What is done in one launch of four processes: wrapper, schedule, model."""


@dataclass
class Found:
    """Of each step: losses, gradients, and weights after."""

    losses: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def finish_step(self, losses: Any, modules: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
        """Note what there is, and let the optimizer change it."""
        self.losses.append(losses)
        for kept, read in ((self.gradients, gradients), (self.weights, weights)):
            kept.append({})
            for module in modules.values():
                kept[-1] |= copy.deepcopy(read(module))
            if read is gradients:
                optimizer.step()
        optimizer.zero_grad()


def _piped(here: Place, pipe: Pipe, how: str, kind: str, name: str) -> Found:
    case, own = CASES[name], copy.deepcopy(pipe)
    held = [index for index, rank in enumerate(PLACEMENTS[kind]) if rank == here.stage]
    stages = [own.build_stage(index, comm=here.comm) for index in held]
    for stage in stages:
        wrap(stage, how, here.replicas)
    modules = nn.ModuleDict({str(stage.index): stage.module for stage in stages})
    schedule = get_schedule_class(kind)(stages, MICROBATCHES, case.loss, seed=here.pipeline)
    optimizer, found = torch.optim.AdamW(modules.parameters(), lr=0.05), Found()
    for step in range(STEPS):
        args, target = data(case, step, here.pipeline)
        losses: list[Tensor] = []
        schedule.step(*args, target=target, losses=losses)
        found.finish_step(losses, modules, optimizer)
    return found


def _body(comm: Comm, pickled: bytes) -> bytes:
    torch.set_num_threads(1)
    here, pipes = place(), pickle.loads(pickled)
    found = [_piped(here, pipes[name], how, kind, name) for how, kind, name in RUNS]
    here.comm.close()
    return pickle.dumps(found)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Found]]:
    """What each of four processes found, run by run."""
    with patience(100.0):
        pipes = {name: cut(case, STAGES, SAMPLES // 2 // MICROBATCHES) for name, case in CASES.items()}
        return [pickle.loads(found) for found in ProcessWorld(4).run(_body, pickle.dumps(pipes))]


@lru_cache
def _expected(case: Case) -> Found:
    halves, found = Halves(case), Found()
    optimizer = torch.optim.AdamW(halves.whole.parameters(), lr=0.05)
    for step in range(STEPS):
        losses = halves.step([data(case, step, pipeline) for pipeline in range(2)])
        found.finish_step(losses, nn.ModuleDict({"whole": halves.whole}), optimizer)
    return found


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_wrapped_stages_under_a_schedule_equal_the_uncut_model_bit_for_bit(
    number: int, by_rank: list[list[Found]]
) -> None:
    _, kind, name = RUNS[number]
    expected = _expected(CASES[name])
    last = PLACEMENTS[kind][-1]
    for rank, runs in enumerate(by_rank):
        pipeline, position = divmod(rank, 2)
        found = runs[number]
        mine = [losses[pipeline] if position == last else [] for losses in expected.losses]
        assert_equal(found.losses, mine, f"losses of rank {rank}")
        for kept, whole in ((found.gradients, expected.gradients), (found.weights, expected.weights)):
            assert_equal(kept, [{key: step[key] for key in kept[0]} for step in whole], f"rank {rank}")


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_the_ranks_of_a_pipeline_hold_the_whole_model(number: int, by_rank: list[list[Found]]) -> None:
    expected = _expected(CASES[RUNS[number][2]]).weights[-1]
    for pipeline in range(2):
        ranks = by_rank[2 * pipeline : 2 * pipeline + 2]
        assert set().union(*(runs[number].weights[-1] for runs in ranks)) == expected.keys()
