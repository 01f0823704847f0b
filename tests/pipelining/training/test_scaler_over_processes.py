"""Loss scaling and clipping on ranks that are processes: what torch's own do with the uncut model."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.pipelining.models import PLAIN, TRANSFORMER, Case
from tests.pipelining.running import assert_equal, cut, keyed
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn

from partita.pipelining import GradScaler, Pipe, Schedule1F1B, UncutReference, clip_grad_norm_
from partita.pipelining.training import LossWeights
from partita.runtime import Comm

STEPS = 4
SETTINGS = {"init_scale": 1024.0, "growth_interval": 2}
CASES = {"plain": PLAIN, "transformer": TRANSFORMER}
OVERFLOWS = {"plain": {1: "a.bias"}, "transformer": {1: "blocks.0.norm.bias", 2: "norm.weight"}}
"""By step: the parameter, on one rank only, whose gradient is infinite."""


@dataclass
class _History:
    """Of each step: the norm before clipping, the scale after it, and the weights."""

    norms: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def _train(name: str, runner: Any, module: nn.Module, scaler: torch.amp.GradScaler) -> _History:
    """Steps with and without overflow, clipped by the norm of the unscaled gradients."""
    case, history = CASES[name], _History()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for step in range(STEPS):
        args, _, target = case.data(8, seed=step)
        if isinstance(runner, UncutReference):
            scaler.scale(torch.zeros(()))
            weights = LossWeights((0.25 * scaler.get_scale(),) * 4, total=None)
            runner.step(*args, target=target, loss_weights=weights)
        else:
            runner.step(*args, target=target)
        spoilt = dict(module.named_parameters()).get(OVERFLOWS[name].get(step, ""))
        if spoilt is not None:
            spoilt.grad.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        if isinstance(runner, UncutReference):
            norm = torch.nn.utils.clip_grad_norm_(list(module.parameters()), 0.1)
        else:
            norm = clip_grad_norm_(runner, 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.norms.append(norm)
        history.scales.append(scaler.get_scale())
        history.weights.append(
            {key: value.detach().clone() for key, value in module.named_parameters(remove_duplicate=False)}
        )
    return history


def _body(comm: Comm, pipes: bytes) -> bytes:
    torch.set_num_threads(1)
    histories = {}
    for name, pipe in pickle.loads(pipes).items():
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, CASES[name].loss)
        histories[name] = _train(name, schedule, stage.module, GradScaler(schedule, "cpu", **SETTINGS))
    return pickle.dumps(histories)


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, _History]]:
    """What both processes found, case by case."""
    pipes: dict[str, Pipe] = {name: cut(case, 2) for name, case in CASES.items()}
    return [pickle.loads(pickled) for pickled in ProcessWorld(2).run(_body, pickle.dumps(pipes))]


@lru_cache
def _expected(name: str) -> _History:
    case: Case = CASES[name]
    whole = keyed(case)
    runner = UncutReference(whole, 4, case.loss)
    return _train(name, runner, whole, torch.amp.GradScaler("cpu", **SETTINGS))


@pytest.mark.parametrize("name", CASES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_stays_common(
    name: str, by_rank: list[dict[str, _History]]
) -> None:
    expected = _expected(name)
    before = dict(CASES[name].model().named_parameters(remove_duplicate=False))
    for step in range(STEPS):
        skipped = all(torch.equal(value, before[key]) for key, value in expected.weights[step].items())
        assert skipped == (step in OVERFLOWS[name])
        before = expected.weights[step]
    for rank in by_rank:
        assert rank[name].scales == expected.scales
        for weights, whole in zip(rank[name].weights, expected.weights, strict=True):
            assert_equal(weights, {key: whole[key] for key in weights})


@pytest.mark.parametrize("name", CASES)
def test_the_norm_over_processes_is_that_of_the_uncut_model_bit_for_bit(
    name: str, by_rank: list[dict[str, _History]]
) -> None:
    expected = _expected(name).norms
    assert [bool(norm.isfinite()) for norm in expected] == [
        step not in OVERFLOWS[name] for step in range(STEPS)
    ]
    for rank in by_rank:
        assert_equal(rank[name].norms, expected)
