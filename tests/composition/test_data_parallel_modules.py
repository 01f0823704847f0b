"""Stages that are plain modules, in two data parallel pipelines; each layer may be sharded for itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.composition.grid import MICROBATCHES, PRECISIONS, SAMPLES, Place, gradients, place, weights, wrap
from tests.pipelining.models import WIDTH
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import ProcessWorld, patience
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from partita.pipelining import PipelineStage, get_schedule_class
from partita.runtime import Comm

STEPS = 2
RUNS = [
    ("ddp", "1F1B", "float32"),
    ("ddp", "InterleavedZeroBubble", "bfloat16"),
    ("fsdp", "1F1B", "float32"),
    ("fsdp", "1F1B", "bfloat16"),
    ("layers", "1F1B", "float32"),
    ("layers", "1F1B", "bfloat16"),
    ("layers", "InterleavedZeroBubble", "bfloat16"),
    ("checkpointed", "1F1B", "float32"),
    ("checkpointed", "1F1B", "bfloat16"),
]
"""What is done in one launch: wrapper, schedule, precision. ``layers``: each layer sharded, and the stage;
``checkpointed``: each layer computed again in the backward pass, and sharded, and the stage.
"""

Found = dict[str, list[Any]]


def _stages() -> list[nn.Module]:
    """Two. All that is computed is plain, so no random numbers: manual stages draw from torch's generator."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)),
    ]


def _half(step: int, pipeline: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    x, target = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)
    half = slice(pipeline * SAMPLES // 2, (pipeline + 1) * SAMPLES // 2)
    return x[half], target[half]


def _train(run: Callable[[int], Any], module: nn.Module, precision: str) -> Found:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    found: Found = {"losses": [], "gradients": [], "weights": []}
    for step in range(STEPS):
        with PRECISIONS[precision]():
            found["losses"].append(run(step))
        found["gradients"].append(copy.deepcopy(gradients(module)))
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(copy.deepcopy(weights(module)))
    return found


def _piped(here: Place, how: str, kind: str, precision: str) -> Found:
    module = _stages()[here.stage]
    if how == "checkpointed":
        module = nn.Sequential(*map(checkpoint_wrapper, module))
    if how in {"layers", "checkpointed"}:
        for layer in module:
            fully_shard(layer, mesh=here.replicas)
    stage = PipelineStage(module, here.stage, 2, torch.device("cpu"), comm=here.comm)
    wrap(stage, how, here.replicas)
    schedule = get_schedule_class(kind)([stage], MICROBATCHES, functional.mse_loss)

    def run(step: int) -> list[Tensor]:
        x, target = _half(step, here.pipeline)
        losses: list[Tensor] = []
        schedule.step(*((x,) if here.stage == 0 else ()), target=target, losses=losses)
        return losses

    return _train(run, stage.module, precision)


def _body(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    here = place()
    found = [_piped(here, *run) for run in RUNS]
    here.comm.close()
    return pickle.dumps(found)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Found]]:
    """What each of four processes found, run by run."""
    with patience(100.0):
        return [pickle.loads(found) for found in ProcessWorld(4).run(_body)]


@lru_cache
def _expected(stage: int, precision: str) -> Found:
    """The modules one after the other, on each half, and the mean of the two gradients."""
    stages = _stages()
    whole = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)

    def run(step: int) -> list[list[Tensor]]:
        losses: list[list[Tensor]] = [[], []]
        means: dict[nn.Parameter, Tensor] = {}
        for pipeline in range(2):
            for x, target in zip(*(part.chunk(MICROBATCHES) for part in _half(step, pipeline)), strict=True):
                torch.clear_autocast_cache()
                loss = functional.mse_loss(whole(x), target)
                (loss / MICROBATCHES).backward()
                losses[pipeline].append(loss.detach())
            for parameter in whole.parameters():
                means[parameter] = means.get(parameter, 0.0) + parameter.grad / 2
                parameter.grad = None
        for parameter, mean in means.items():
            parameter.grad = mean
        return losses

    found: Found = {"losses": [], "gradients": [], "weights": []}
    for step in range(STEPS):
        with PRECISIONS[precision]():
            found["losses"].append(run(step))
        found["gradients"].append(copy.deepcopy(gradients(stages[stage])))
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(copy.deepcopy(weights(stages[stage])))
    return found


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_wrapped_modules_equal_the_chain_of_them_bit_for_bit(number: int, by_rank: list[list[Found]]) -> None:
    for rank, runs in enumerate(by_rank):
        pipeline, stage = divmod(rank, 2)
        expected = _expected(stage, RUNS[number][2])
        losses = [found[pipeline] if stage else [] for found in expected["losses"]]
        assert_equal(runs[number], expected | {"losses": losses}, f"rank {rank}")
