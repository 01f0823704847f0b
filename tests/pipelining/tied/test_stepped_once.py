"""A tied weight that two stages of one rank share is stepped once a step, or the user hears of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pipelining.models import TRANSFORMER
from tests.pipelining.running import cut
from torch import Tensor, nn

from partita.errors import ExecutionError
from partita.pipelining import ScheduleZBVZeroBubble
from partita.runtime import Comm, InProcessWorld

PLACEMENT = (0, 1, 1, 0)
Optimizers = Callable[[list[nn.Module]], list[torch.optim.Optimizer]]


def _one_each(modules: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]


def _twice_in_one(modules: list[nn.Module]) -> list[torch.optim.Optimizer]:
    groups = [{"params": [weight]} for module in modules for weight in module.parameters()]
    optimizer = torch.optim.SGD(groups[:1], lr=0.1)
    optimizer.param_groups += [{**optimizer.param_groups[0], **group} for group in groups[1:]]
    return [optimizer]


def _as_advised(modules: list[nn.Module]) -> list[torch.optim.Optimizer]:
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    return [torch.optim.SGD(parameters, lr=0.1)]


def _one_after_the_other(modules: list[nn.Module]) -> list[torch.optim.Optimizer]:
    """Which is two trainings."""
    return [*_as_advised(modules), *_as_advised(modules)]


def _train(optimizers_of: Optimizers, *, together: bool = True) -> list[dict[str, Tensor]]:
    pipe = cut(TRANSFORMER, 4)
    args, kwargs, target = TRANSFORMER.data(8)

    def body(comm: Comm) -> dict[str, Tensor]:
        mine: Any = copy.deepcopy(pipe)
        stages = [mine.build_stage(n, comm=comm) for n, rank in enumerate(PLACEMENT) if rank == comm.rank]
        schedule = ScheduleZBVZeroBubble(stages, 4, TRANSFORMER.loss)
        optimizers = optimizers_of([stage.module for stage in stages])
        for number in range(2):
            schedule.step(*args, target=target, **kwargs)
            for optimizer in optimizers if together else optimizers[number : number + 1]:
                optimizer.step()
            for stage in stages:
                stage.module.zero_grad()
        return {name: p.detach() for stage in stages for name, p in stage.module.named_parameters()}

    return InProcessWorld(2).run(body)


@pytest.mark.parametrize("optimizers_of", [_one_each, _twice_in_one])
def test_a_second_use_of_one_gradient_is_refused(optimizers_of: Optimizers) -> None:
    with pytest.raises(
        ExecutionError, match=r"is one parameter of the stages \[0, 3\].*one optimizer for all"
    ):
        _train(optimizers_of)


def test_the_advice_and_optimizers_that_take_turns_are_right() -> None:
    advised, in_turns = _train(_as_advised), _train(_one_after_the_other, together=False)
    for left, right in zip(advised, in_turns, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
