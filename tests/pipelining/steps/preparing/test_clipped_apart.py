"""Ranks that clip their own gradients, as scripts for one process do, train another model, without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_ as torchs
from torch.nn.utils import clip_grad_value_

from partita.errors import ExecutionError
from partita.pipelining import Schedule1F1B, SplitPoint, clip_grad_norm_, pipeline
from partita.runtime import Comm, InProcessWorld

Clip = Callable[[Schedule1F1B, Sequence[nn.Parameter]], object]


def _train(clip: Clip, steps: int = 3) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)
    model = nn.Sequential(*layers)
    x, target = 10 * torch.randn(4, 4), torch.randn(4, 2)
    pipe = pipeline(model, (x[:2],), split_spec={"3": SplitPoint.BEGINNING})

    def body(comm: Comm) -> list[torch.Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        parameters = list(stage.module.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        for _ in range(steps):
            schedule.step(x, target=target)
            clip(schedule, parameters)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in parameters]

    return InProcessWorld(2).run(body)


def test_norms_of_each_ranks_own_gradients_are_refused_in_the_next_step() -> None:
    message = r"ranks 0 and 1 both had the norm 0.5 .*clip_grad_norm_\(schedule, 0.5\) instead"
    with pytest.raises(ExecutionError, match=message):
        _train(lambda _, parameters: torchs(parameters, 0.5))


@pytest.mark.parametrize("limit", [0.1, 0.02, 0.001])
def test_small_limits_of_small_gradients_are_seen(limit: float) -> None:
    """torch divides by the norm and 1e-6, so the norm afterwards is the further from the limit the smaller it
    was; nothing below 0.1 was seen."""

    def clip(_: object, parameters: Sequence[nn.Parameter]) -> None:
        norms = [parameter.grad.norm() for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(1.5 * limit / torch.stack(norms).norm())
        torchs(parameters, limit)

    with pytest.raises(ExecutionError, match=f"both had the norm {limit:g} when"):
        _train(clip)


@pytest.mark.parametrize(
    "clip",
    [
        lambda schedule, _: clip_grad_norm_(schedule, 0.5),  # what the message says
        lambda _, parameters: clip_grad_value_(parameters, 0.01),
        lambda _, parameters: [parameter.grad.div_(parameter.grad.norm()) for parameter in parameters],
        lambda _, parameters: [parameter.grad.sign_() for parameter in parameters],
        lambda *_: None,
    ],
    ids=["of_all", "by_value", "each_alone", "signs", "none"],
)
def test_what_is_right_on_each_rank_alone_is_let_through(clip: Clip) -> None:
    _train(clip, 10)


def test_a_model_of_one_rank_may_be_clipped_by_anyone() -> None:
    model, x = nn.Linear(4, 2), torch.randn(4, 4)

    def body(comm: Comm) -> None:
        stage = pipeline(model, (x[:2],), split_spec={}).build_stage(0, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        for _ in range(2):
            schedule.step(x, target=torch.zeros(4, 2))
            torchs(stage.module.parameters(), 0.01)
            torch.optim.SGD(stage.module.parameters(), lr=0.1).step()

    InProcessWorld(1).run(body)


def test_a_tied_weight_may_have_the_whole_norm_on_two_ranks() -> None:
    """Both had the norm 1 and were refused. (Clipped apart, its copies drift apart, which is refused.)"""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.small = nn.Parameter(torch.zeros(8))
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.last(self.first(x) + 1e-5 * self.small)
            return h

    torch.manual_seed(0)
    pipe = pipeline(Tied(), (torch.randn(2, 8),), split_spec={"last": SplitPoint.BEGINNING})
    x = 10 * torch.randn(4, 8)

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.01)
        for _ in range(3):
            schedule.step(*((x,) if comm.rank == 0 else ()), target=x)
            clip_grad_norm_(schedule, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    InProcessWorld(2).run(body)
