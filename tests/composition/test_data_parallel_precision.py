"""Two data parallel pipelines with dropout, autocast and loss scaling: the bits of the uncut model.

Each pipeline draws from a seed of its own, so the uncut model runs over each half of the batch with that
half's seed, and the two gradients are averaged.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.composition.grid import (
    MICROBATCHES,
    PRECISIONS,
    Halves,
    Place,
    cut,
    data,
    gradients,
    place,
    weights,
    wrap,
)
from tests.pipelining.models import TRANSFORMER, WIDTH, Case, Noisy
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import ProcessWorld, patience
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partita.pipelining import GradScaler, Schedule1F1B
from partita.runtime import Comm

STEPS = 3
SETTINGS = {"init_scale": 1024.0, "growth_interval": 1}
LOUD, SPOILT = 1, 2
"""Steps: in one the loss of pipeline 1 alone overflows, in the other one element of one gradient."""


def _untied() -> nn.Module:
    model = Noisy()
    model.head.weight = nn.Parameter(torch.randn(16, WIDTH))
    return model


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.a(x).relu(), 0.3, self.training)
        return self.c(nn.functional.dropout(self.b(h).tanh(), 0.3, self.training))


CASES = {
    "tied": TRANSFORMER,
    "untied": Case("untied", _untied, TRANSFORMER.after, TRANSFORMER.batch, TRANSFORMER.loss),
    "drops": Case("drops", Drops, ("a",)),
}
RUNS = [
    ("ddp", "float32", "tied"),
    ("fsdp", "float32", "untied"),
    ("ddp", "bfloat16", "tied"),
    ("fsdp", "bfloat16", "untied"),
    ("ddp", "float16", "drops"),
    ("fsdp", "float16", "drops"),
]
"""What is done in one launch: wrapper, precision, model. Losses are scaled in float16."""


@dataclass
class Found:
    """Of each step: losses, gradients before the optimizer sees them, the scale and the weights after."""

    losses: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def _half(name: str, precision: str, step: int, pipeline: int) -> tuple[tuple[Any, ...], Tensor]:
    args, target = data(CASES[name], step, pipeline)
    loud = precision == "float16" and step == LOUD and pipeline == 1
    return args, target * 1e30 if loud else target


def _train(
    run: Callable[[int], Any], module: nn.Module, precision: str, scaler: torch.amp.GradScaler
) -> Found:
    found, optimizer = Found(), torch.optim.AdamW(module.parameters(), lr=0.05)
    for step in range(STEPS):
        with PRECISIONS[precision]():
            found.losses.append(run(step))
        if precision == "float16" and step == SPOILT:
            _spoil(module)
        found.gradients.append(copy.deepcopy(gradients(module)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.scales.append(scaler.get_scale())
        found.weights.append(copy.deepcopy(weights(module)))
    return found


def _spoil(module: nn.Module) -> None:
    """The last element of one gradient; where that is sharded, only the last replica has it."""
    for name, parameter in module.named_parameters():
        if name.endswith("a.weight"):
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                if gradient.device_mesh.get_local_rank() == 0:
                    return
                gradient = gradient.to_local()
            gradient[-1, -1] = float("inf")


def _piped(here: Place, pipe: Any, how: str, precision: str, name: str) -> Found:
    stage = copy.deepcopy(pipe).build_stage(here.stage, comm=here.comm)
    wrap(stage, how, here.replicas)
    schedule = Schedule1F1B(stage, MICROBATCHES, CASES[name].loss, seed=here.pipeline)

    def run(step: int) -> list[Tensor]:
        args, target = _half(name, precision, step, here.pipeline)
        losses: list[Tensor] = []
        schedule.step(*args, target=target, losses=losses)
        return losses

    scaler = GradScaler(schedule, "cpu", **SETTINGS, enabled=precision == "float16")
    return _train(run, stage.module, precision, scaler)


def _body(comm: Comm, pickled: bytes) -> bytes:
    torch.set_num_threads(1)
    here, pipes = place(), pickle.loads(pickled)
    found = [_piped(here, pipes[name], how, precision, name) for how, precision, name in RUNS]
    here.comm.close()
    return pickle.dumps(found)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Found]]:
    """What each of four processes found, run by run."""
    with patience(100.0):
        pipes = pickle.dumps({name: cut(case) for name, case in CASES.items()})
        return [pickle.loads(found) for found in ProcessWorld(4).run(_body, pipes)]


@lru_cache
def _expected(precision: str, name: str) -> Found:
    halves = Halves(CASES[name])
    scaler = torch.amp.GradScaler("cpu", **SETTINGS, enabled=precision == "float16")

    def run(step: int) -> list[list[Tensor]]:
        scaler.scale(torch.zeros(()))
        both = [_half(name, precision, step, pipeline) for pipeline in range(2)]
        return halves.step(both, scaler.get_scale())

    return _train(run, halves.whole, precision, scaler)


def _of(found: list[dict[str, Tensor]], names: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: step[name] for name in names} for step in found]


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_each_pipeline_loses_what_the_uncut_model_loses_on_its_half_with_its_seed(
    number: int, by_rank: list[list[Found]]
) -> None:
    expected = _expected(*RUNS[number][1:]).losses
    for rank, runs in enumerate(by_rank):
        pipeline, stage = divmod(rank, 2)
        mine = [losses[pipeline] if stage else [] for losses in expected]
        assert_equal(runs[number].losses, mine)


@pytest.mark.parametrize("number", [n for n, run in enumerate(RUNS) if run[1] != "float16"])
def test_gradients_are_the_mean_of_the_two_halves_bit_for_bit(
    number: int, by_rank: list[list[Found]]
) -> None:
    expected = _expected(*RUNS[number][1:])
    for runs in by_rank:
        found = runs[number]
        assert_equal(found.gradients, _of(expected.gradients, found.gradients[0]))
        assert_equal(found.weights, _of(expected.weights, found.weights[0]))


@pytest.mark.parametrize("number", [n for n, run in enumerate(RUNS) if run[1] == "float16"])
def test_an_overflow_in_one_pipeline_skips_the_step_in_both(number: int, by_rank: list[list[Found]]) -> None:
    expected = _expected(*RUNS[number][1:])
    assert expected.scales == [2048.0, 1024.0, 512.0]
    for runs in by_rank:
        found = runs[number]
        assert found.scales == expected.scales
        assert_equal(found.weights, _of(expected.weights, found.weights[0]))
        assert_equal(found.weights[0], found.weights[-1])


def test_pipelines_with_seeds_of_their_own_draw_other_masks() -> None:
    halves = Halves(CASES["drops"])
    same = _half("drops", "float32", 0, 0)
    first, second = halves.step([same, same])
    assert not torch.equal(first[0], second[0])
