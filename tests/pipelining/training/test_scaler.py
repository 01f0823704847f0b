"""Loss scaling: an overflow anywhere skips the step everywhere."""

from __future__ import annotations

import copy
import gc
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.group_of_one import group_of_one
from tests.pipelining.models import PLAIN
from tests.pipelining.running import assert_equal, cut, keyed
from torch import Tensor, nn

from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining import GradScaler, Schedule1F1B, UncutReference
from partita.pipelining.training import LossWeights
from partita.runtime import Comm, InProcessWorld, ProcessGroupComm

SETTINGS = {"init_scale": 1024.0, "growth_interval": 2}
OVERFLOWS = (1,)
"""Steps in which the first stage's gradient overflows."""
STEPS = 4


def _optimizer(modules: list[nn.Module], kind: str) -> torch.optim.Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    if kind == "fused":
        return torch.optim.Adam(parameters, lr=0.05, fused=True)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _spoil(step: int, module: nn.Module) -> None:
    if step in OVERFLOWS:
        module.get_parameter("a.bias").grad[0] = float("inf")


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _uncut(kind: str) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Torch's own scaler on the uncut model."""
    args, _, target = PLAIN.data(8)
    whole = keyed(PLAIN)
    runner, optimizer = UncutReference(whole, 4, PLAIN.loss), _optimizer([whole], kind)
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    states, scales = [], []
    for step in range(STEPS):
        scaler.scale(torch.zeros(()))
        weights = LossWeights((0.25 * scaler.get_scale(),) * 4, total=None)
        runner.step(*args, target=target, loss_weights=weights)
        _spoil(step, whole)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(_state(whole))
        scales.append(scaler.get_scale())
    return states, scales


@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale_ and step"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_all_ranks_skip_and_scale_as_the_uncut_model_does(kind: str, unscale_first: bool) -> None:
    pipe = cut(PLAIN, 3)

    def body(comm: Comm) -> tuple[list[dict[str, Tensor]], list[float]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, PLAIN.loss)
        scaler = GradScaler(schedule, "cpu", **SETTINGS)
        optimizer = _optimizer([stage.module], kind)
        args, _, target = PLAIN.data(8)
        states, scales = [], []
        for step in range(STEPS):
            schedule.step(*args, target=target)
            if comm.rank == 0:
                _spoil(step, stage.module)
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            states.append(_state(stage.module))
            scales.append(scaler.get_scale())
        return states, scales

    expected_states, expected_scales = _uncut(kind)
    assert expected_scales == [1024.0, 512.0, 512.0, 1024.0]
    for states, scales in InProcessWorld(3).run(body):
        assert scales == expected_scales
        for state, expected in zip(states, expected_states, strict=True):
            assert_equal(state, {name: expected[name] for name in state})


def test_a_rank_that_trains_nothing_agrees_too() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> tuple[float, bool]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, PLAIN.loss)
        scaler = GradScaler(schedule, "cpu", **SETTINGS)
        optimizer = _optimizer([stage.module], "plain") if comm.rank == 0 else None
        args, _, target = PLAIN.data(8)
        schedule.step(*args, target=target)
        if comm.rank == 0:
            _spoil(1, stage.module)
        before = _state(stage.module)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(torch.equal(before[n], v) for n, v in _state(stage.module).items())

    assert InProcessWorld(2).run(body) == [(512.0, True), (512.0, True)]


def test_a_scaler_works_when_its_schedule_is_held_by_nobody_else() -> None:
    args, _, target = PLAIN.data(8)
    with group_of_one():
        schedule = Schedule1F1B(cut(PLAIN, 1).build_stage(0), 4, PLAIN.loss)
        optimizer = _optimizer([schedule.stages[0].module], "fused")
        scaler = GradScaler(schedule, "cpu")
        schedule.step(*args, target=target)
        del schedule
        gc.collect()
        with ProcessGroupComm.from_group():
            scaler.step(optimizer)


def test_a_scaler_that_is_off_does_nothing() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> dict[str, Tensor]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, PLAIN.loss)
        scaler = GradScaler(schedule, "cpu", enabled=False)
        optimizer = _optimizer([stage.module], "plain")
        args, _, target = PLAIN.data(8)
        schedule.step(*args, target=target)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return _state(stage.module)

    args, _, target = PLAIN.data(8)
    whole = keyed(PLAIN)
    UncutReference(whole, 4, PLAIN.loss).step(*args, target=target)
    _optimizer([whole], "plain").step()
    expected = _state(whole)
    for state in InProcessWorld(2).run(body):
        assert_equal(state, {name: expected[name] for name in state})


def _errors(body: Any) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None, None]
    pipe = cut(PLAIN, 2)

    def caught(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, PLAIN.loss)
        try:
            body(comm, schedule)
        except Exception as error:
            errors[comm.rank] = error
            raise

    with suppress(Exception):
        InProcessWorld(2).run(caught)
    return errors


def test_scalers_that_differ_are_an_error_on_both_ranks() -> None:
    def body(comm: Comm, schedule: Schedule1F1B) -> None:
        GradScaler(schedule, "cpu", init_scale=2.0 ** (comm.rank + 1))

    for error in _errors(body):
        assert isinstance(error, SignatureMismatch)
        assert "the gradient scaler's init_scale is 2.0 on rank 0 and 4.0 on rank 1: make them" in str(error)


def test_ranks_that_unscale_in_another_order_are_an_error() -> None:
    def body(comm: Comm, schedule: Schedule1F1B) -> None:
        scaler = GradScaler(schedule, "cpu")
        for _ in range(2):
            if comm.rank == 0 or not scaler.get_growth_interval():
                scaler.unscale_(None)
                continue
            scaler.unscale_(None)
            scaler._unscaled.clear()  # as if it had updated in between

    errors = _errors(body)
    assert any(isinstance(error, ExecutionError) for error in errors)
    assert any("call unscale_(), step() and update() in the same order" in str(error) for error in errors)
