from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.pipelining.models import PLAIN
from tests.pipelining.running import cut

from partita.errors import ArgumentTypeError
from partita.pipelining import Pipe, Schedule1F1B, clip_grad_norm_
from partita.pipelining.training import StepMeter, StepMetrics, log_to
from partita.runtime import Comm, InProcessWorld, Tracer


def _train(pipe: Pipe, comm: Comm, tracer: Any = None) -> list[StepMetrics]:
    schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2, PLAIN.loss)
    if tracer is not None:
        schedule.tracer = tracer
    seen: list[StepMetrics] = []
    meter = StepMeter(schedule, *([seen.append] if comm.rank == 0 else []))
    args, _, target = PLAIN.data(4)
    for _ in range(2):
        losses: list[Any] = []
        schedule.step(*args, target=target, losses=losses)
        norm = clip_grad_norm_(schedule, 1.0)
        meter.end_step(losses, grad_norm=norm, samples=4, tokens=40 if comm.rank else None)
    return seen


def test_a_rank_that_logs_has_the_losses_and_numbers_of_the_others() -> None:
    first, second = InProcessWorld(2).run(partial(_train, cut(PLAIN, 2)))[0]
    assert (first.step, second.step) == (0, 1)
    assert len(first.losses) == 2
    assert first.loss == pytest.approx(sum(first.losses) / 2)
    assert first.grad_norm is not None
    assert (first.samples, first.tokens) == (4, 40)
    assert first.bubble is not None
    assert 0 <= first.bubble <= 1
    assert second.tokens_per_second == pytest.approx(40 / second.seconds)


def test_a_tracer_of_the_users_stays_and_there_is_no_bubble_then() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> list[StepMetrics]:
        return _train(pipe, comm, Tracer(comm.rank))

    assert InProcessWorld(2).run(body)[0][0].bubble is None


@pytest.mark.parametrize("method", ["add_scalar", "log_metrics", "log"])
def test_each_logger_is_called_in_its_own_way(method: str) -> None:
    calls: list[tuple[Any, ...]] = []
    logger = SimpleNamespace(**{method: lambda *values, **named: calls.append((*values, *named.values()))})
    log_to(logger)(StepMetrics(3, 0.5, losses=(2.0,)))
    single = [("train/loss", 2.0, 3), ("train/seconds", 0.5, 3)]
    assert calls == (single if method == "add_scalar" else [({"train/loss": 2.0, "train/seconds": 0.5}, 3)])


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="a int has no add_scalar, log_metrics or log"):
        log_to(3)
