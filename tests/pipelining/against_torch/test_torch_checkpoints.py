"""What a checkpoint made from stages holds: each test first shows where ``torch.distributed.pipelining`` is
(still) wrong, then that with partita the state dicts are those of the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional

from partita import pipelining as ours
from partita.runtime import Comm, InProcessWorld

MICROBATCHES = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(16, WIDTH)
        self.b = nn.Linear(WIDTH, 16, bias=False)
        self.b.weight = self.a.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b(self.a(tokens).tanh())


class Twice(nn.Module):
    """A layer that runs before and after the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x)).relu())


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(16, (2 * MICROBATCHES,)), torch.randint(16, (2 * MICROBATCHES,))


def _x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, WIDTH)


def _cut(package: Any, model: nn.Module, x: Tensor) -> Any:
    return package.pipeline(model, (x[:2],), split_spec={"b": package.SplitPoint.BEGINNING})


def _states(pipe: Any) -> list[dict[str, Tensor]]:
    return [dict(pipe.get_stage_module(index).state_dict()) for index in range(pipe.num_stages)]


def test_a_module_that_is_called_twice_is_saved_under_a_name_that_the_model_has_not() -> None:
    model, x = _model(Twice), _x()
    there = _states(_cut(theirs, copy.deepcopy(model), x))
    assert {"a@1.weight", "a@1.bias"} <= there[1].keys()
    pipe = _cut(ours, copy.deepcopy(model), x)
    assert set().union(*_states(pipe)) == model.state_dict().keys()
    for state in _states(pipe):
        assert_equal(state, {name: model.state_dict()[name] for name in state})
    assert torch.equal(pipe(x[:2]), model(x[:2]))


def test_stage_0_keeps_a_copy_of_a_tied_parameter_that_no_step_reaches() -> None:
    tokens, target = _tokens()
    before = _model(Tied).state_dict()["b.weight"].clone()
    pipe = _cut(theirs, _model(Tied), tokens)
    stages = [pipe.get_stage_module(index) for index in range(2)]
    functional.cross_entropy(stages[1](stages[0](tokens)), target).backward()
    torch.optim.SGD([value for stage in stages for value in stage.parameters()], lr=0.5).step()
    first = stages[0].state_dict()
    assert not torch.equal(first["a.weight"], before)
    assert torch.equal(first["b.weight"], before)  # and whichever stage is saved last wins

    expected = _model(Tied)
    for part, wanted in zip(tokens.split(2), target.split(2), strict=True):
        (functional.cross_entropy(expected(part), wanted) / MICROBATCHES).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    cut = _cut(ours, _model(Tied), tokens)

    def body(comm: Comm) -> dict[str, Tensor]:
        mine = copy.deepcopy(cut).build_stage(comm.rank, comm=comm)
        ours.ScheduleGPipe(mine, MICROBATCHES, functional.cross_entropy).step(tokens, target=target)
        torch.optim.SGD(mine.module.parameters(), lr=0.5).step()
        return dict(mine.module.state_dict())

    states = InProcessWorld(2).run(body)
    assert set().union(*states) == expected.state_dict().keys()
    for state in states:
        assert_equal(state, {name: expected.state_dict()[name] for name in state})
