"""Autocast around a pipeline that was cut without it, and inside the model."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.pipelining.models import CALLED, CASES, PLAIN, REGIONS, SKIP, TRANSFORMER, Case
from tests.pipelining.running import Record, assert_equal, assert_same, cut, errors_of, piped, train, uncut
from torch import Tensor, nn

from partita.capture.proving.autocasts import current_autocast
from partita.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from partita.pipelining.steps.preparing import precision
from partita.pipelining.steps.preparing.precision import Precision
from partita.runtime import Comm, InProcessWorld

BF16 = ("cpu", torch.bfloat16)
SHARED_WEIGHT = {CALLED.name, "constants"}
"""Uses one weight in two stages: uncut, autocast converts it once, and sums its gradients in bfloat16."""


def _under_autocast(runner: Any, modules: Any, case: Case, record: Record) -> None:
    with torch.autocast(*BF16):
        train(runner, modules, case, record)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in SHARED_WEIGHT], ids=lambda case: case.name
)
def test_training_under_autocast_equals_the_uncut_model_under_it(case: Case) -> None:
    pipe = cut(case, len(case.after) + 1)
    results = piped(pipe, case, run=_under_autocast)
    assert_same(results, uncut(case, run=_under_autocast))


def test_a_weight_that_two_stages_use_gets_a_gradient_summed_in_its_own_precision() -> None:
    def gradients(runner: Any, modules: Any, case: Case, record: Record) -> None:
        args, _, target = case.data(8)
        with torch.autocast(*BF16):
            runner.step(*args, target=target)
        for module in modules:
            record.note(module)

    expected = uncut(CALLED, run=gradients).gradients
    for record in piped(cut(CALLED, 3), CALLED, run=gradients):
        for name, gradient in record.gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=1e-3)


class Forks(nn.Module):
    """Its second half uses a float32 value, which the first one makes, in two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.q(h).tanh() * self.k(h)


def test_a_value_from_another_stage_is_converted_for_each_of_its_uses() -> None:
    """It was a leaf there, and autocast converts a leaf once for all uses, as it does weights: the gradients
    of both were summed in bfloat16.
    """
    model, x = Forks(), torch.randn(8, 16)
    pipe = pipeline(copy.deepcopy(model), (x[:4],), split_spec={"norm": SplitPoint.END})

    def body(comm: Comm) -> dict[str, Tensor | None]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        with torch.autocast(*BF16):
            ScheduleGPipe(stage, 2, nn.functional.mse_loss).step(x, target=x)
        return {name: parameter.grad for name, parameter in stage.module.named_parameters()}

    first, second = InProcessWorld(2).run(body)
    for part in x.chunk(2):
        with torch.autocast(*BF16):
            loss = nn.functional.mse_loss(model(part), part)
        (loss / 2).backward()
    gradients = first | second
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def test_a_pipeline_goes_in_and_out_of_autocast() -> None:
    def alternating(runner: Any, modules: Any, case: Case, record: Record) -> None:
        for step in range(4):
            args, _, target = case.data(8, seed=step)
            losses: list[Tensor] = []
            with torch.autocast(*BF16) if step % 2 else contextlib.nullcontext():
                record.outputs.append(runner.step(*args, target=target, losses=losses))
            record.losses.append(losses)
        for module in modules:
            record.note(module)

    assert_same(piped(cut(SKIP, 3), SKIP, run=alternating), uncut(SKIP, run=alternating))


def test_dtypes_are_worked_out_once_for_each_kind_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = cut(PLAIN, 2)
    args, _, target = PLAIN.data(8)
    works_out = Mock(wraps=precision.work_out_dtypes)
    monkeypatch.setattr(precision, "work_out_dtypes", works_out)

    def body(comm: Comm) -> None:
        schedule = ScheduleGPipe(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, PLAIN.loss)
        for _ in range(2):
            with torch.autocast(*BF16):
                schedule.step(*args, target=target)

    InProcessWorld(2).run(body)
    assert works_out.call_count == 2  # once on each rank


def test_a_weight_that_the_optimizer_has_changed_is_converted_again() -> None:
    """In torch, an autocast block around the training loop keeps the weights that it converted first."""
    args, _, target = PLAIN.data(8)

    def run(one_block: bool) -> list[Tensor]:
        pipe = cut(PLAIN, 1)

        def body(comm: Comm) -> list[Tensor]:
            stage = copy.deepcopy(pipe).build_stage(0, comm=comm)
            schedule = ScheduleGPipe(stage, 4, PLAIN.loss)
            optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.5)

            def steps(number: int) -> None:
                with torch.autocast(*BF16) if not one_block else contextlib.nullcontext():
                    schedule.eval(*args)
                    schedule.step(*args, target=target)
                optimizer.step()
                optimizer.zero_grad()

            with torch.autocast(*BF16) if one_block else contextlib.nullcontext():
                for number in range(2):
                    steps(number)
            return [parameter.detach().clone() for parameter in stage.module.parameters()]

        return InProcessWorld(1).run(body)[0]

    assert_equal(run(one_block=True), run(one_block=False))
    model = PLAIN.model()
    with torch.autocast(*BF16):
        before = model(*args)
        with torch.no_grad():
            model.d.weight.mul_(2.0)
        assert torch.equal(model(*args), before)


def test_a_local_call_under_autocast_is_the_models() -> None:
    pipe, model, (args, _, _) = cut(TRANSFORMER, 3), TRANSFORMER.model(), TRANSFORMER.data(2)
    with torch.autocast(*BF16):
        results, expected = pipe.eval()(*args), model.eval()(*args)
    assert_equal(results, expected)


def test_autocast_on_one_rank_only_is_an_error_on_all() -> None:
    pipe = cut(PLAIN, 2)
    args, _, target = PLAIN.data(8)

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, PLAIN.loss)
        with torch.autocast(*BF16) if comm.rank else contextlib.nullcontext():
            schedule.step(*args, target=target)

    for error in errors_of(2, body):
        assert "step() number 0 in train mode" in str(error)
        assert "step() number 0 in train mode under autocast('cpu', torch.bfloat16)" in str(error)


def test_autocast_inside_the_model_and_around_it() -> None:
    assert_same(
        piped(cut(REGIONS, 3), REGIONS, ScheduleGPipe, run=_under_autocast),
        uncut(REGIONS, run=_under_autocast),
    )


def test_without_autocast_routes_stay_as_they_are() -> None:
    assert current_autocast("cpu") is None
    pipe = cut(PLAIN, 2)
    stage = pipe.build_stage(0)
    assert isinstance(stage.module, nn.Module)

    def body(comm: Comm) -> bool:
        return Precision().routes(comm, {0: stage}, pipe.routes, ()) is pipe.routes

    assert InProcessWorld(1).run(body) == [True]
