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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from partita.pipelining import GradScaler, Pipe, PipelineStage, Schedule1F1B, UncutReference, clip_grad_norm_
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


def _tensor_parallel(comm: Comm) -> list[float]:
    """The gradient of a weight of which each rank has a half, and the scales of two steps. In the second one
    a part that one rank alone has is infinite.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    mesh = init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("pp", "tp"))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stage = PipelineStage(layers, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 1, nn.functional.mse_loss)
    scaler = GradScaler(schedule, "cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    results = []
    for spoilt in (False, True):
        x = torch.ones(2, 4).triu()
        schedule.step(x, target=x)
        gradient = layers[0].weight.grad
        assert isinstance(gradient, DTensor)
        if spoilt and comm.rank == 1:
            gradient.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        results += [scaler.get_scale(), gradient.full_tensor().abs().sum().item()]
        optimizer.zero_grad()
    schedule.close()
    return results


def test_gradients_of_tensor_parallel_layers_are_unscaled_beside_others() -> None:
    """It was an error of torch's, which computes with tensors of one mesh at a time."""
    one, two = ProcessWorld(2).run(_tensor_parallel)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    x = torch.ones(2, 4).triu()
    nn.functional.mse_loss(layers(x), x).backward()
    expected = layers[0].weight.grad.abs().sum().item()  # type: ignore[operator, union-attr]
    assert one == two == [1024.0, pytest.approx(expected), 512.0, float("inf")]
