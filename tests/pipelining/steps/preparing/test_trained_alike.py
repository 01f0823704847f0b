"""A rank that leaves its optimizer out falls a step behind the others; one whose learning rate follows a loss
of its own leaves theirs. Nobody heard of either.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.pipelining.steps.preparing.trained_alike import _rate
from partita.runtime import Comm, InProcessWorld

TEXT = r"stepped the weights of rank 1 since the last step, and none those of rank 0, for the first time"


def _train(steps: Callable[[int, int], bool], count: int = 5, *, frozen: int | None = None) -> None:
    """Train with an optimizer that is called where ``steps(rank, number)`` says so."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    if frozen is not None:
        model[frozen].requires_grad_(False)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.1)
        for number in range(count):
            schedule.step(x, target=torch.zeros(4, 4))
            schedule.eval(x)
            if steps(comm.rank, number):
                optimizer.step()

    InProcessWorld(2).run(body)


def test_a_rank_that_was_not_stepped_for_the_first_time_is_named_on_both_once() -> None:
    with pytest.warns(UserWarning, match=TEXT) as seen:
        _train(lambda rank, number: rank == 1 or number not in (2, 3))
    assert [one.filename for one in seen] == [__file__] * 2


@pytest.mark.parametrize(
    "steps",
    [
        lambda *_: True,
        lambda _, number: number % 3 == 2,  # gradients are accumulated
        lambda rank, number: rank == number % 2,  # parts take turns
        lambda rank, _: rank == 1,  # the head alone
        lambda rank, number: rank == 1 or number % 2 == 1,  # a critic more often
        lambda rank, number: number % (2 + 2 * rank) == 1 + 2 * rank,  # each part over as many as it needs
        lambda rank, number: rank == 1 or number > 9,  # the head first
        lambda _, number: number % 3 == 2 or number > 9,  # over fewer, later
        lambda *_: False,
    ],
    ids=["always", "accumulation", "turns", "head", "critic", "other sums", "unfrozen", "fewer", "never"],
)
def test_what_has_been_so_from_the_start_is_meant(steps: Callable[[int, int], bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(steps, 20)


def _train_by_rates(rates: Callable[[int, int], float], count: int = 6) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        optimizer = torch.optim.SGD(stage.module.parameters(), lr=rates(comm.rank, 0))
        for number in range(count):
            schedule.step(x, target=torch.zeros(4, 4))
            optimizer.param_groups[0]["lr"] = rates(comm.rank, number)
            optimizer.step()

    InProcessWorld(2).run(body)


def test_a_learning_rate_that_leaves_the_others_is_named_on_both_ranks_once() -> None:
    with pytest.warns(UserWarning, match=r"the learning rate of rank \d is .* had been alike") as seen:
        _train_by_rates(lambda rank, number: 0.01 if rank and number > 2 else 0.1, 7)
    texts = sorted(str(one.message)[:60] for one in seen)
    assert texts == [
        "the learning rate of rank 0 is 1 of what it was at first, an",
        "the learning rate of rank 1 is 0.1 of what it was at first, ",
    ]


@pytest.mark.parametrize(
    "rates",
    [
        lambda _, number: 0.1 / (1 + number),
        lambda rank, number: 0.1 * (1 + rank) / (1 + number),  # rates of their own, one schedule
        lambda rank, number: 0.1 / (1 + rank * number),  # schedules of their own, from the start
    ],
    ids=["one", "two rates", "two schedules"],
)
def test_learning_rates_that_rise_and_fall_together_or_never_did(rates: Callable[[int, int], float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train_by_rates(rates)


def test_groups_with_schedules_of_their_own_may_come_in_any_order() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        groups = [{"params": [weight]} for weight in stage.module.parameters()]
        optimizer = torch.optim.SGD(groups[:: 1 - 2 * comm.rank], lr=0.1)
        for number in range(6):
            schedule.step(x, target=torch.zeros(4, 4))
            optimizer.param_groups[-comm.rank]["lr"] = 0.1 if number < 3 else 0.01
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InProcessWorld(2).run(body)


def test_optimizers_with_schedules_of_their_own_may_be_stepped_in_any_order() -> None:
    """Each rank followed the optimizer that it happened to step first, and was told that rates had parted."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in stage.module.parameters()]
        for number in range(6):
            schedule.step(x, target=torch.zeros(4, 4))
            optimizers[0].param_groups[0]["lr"] = 0.1 if number < 3 else 0.01
            for optimizer in optimizers[:: 1 - 2 * comm.rank]:
                optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InProcessWorld(2).run(body)


def test_a_rate_that_is_elsewhere_is_not_waited_for() -> None:
    assert math.isnan(_rate(torch.tensor(0.1, device="meta")))
    assert _rate(torch.tensor(0.5)) == _rate(0.5) == 0.5


def test_a_rank_without_anything_to_train_needs_no_optimizer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(lambda rank, number: rank == 1 or number < 3, frozen=0)
