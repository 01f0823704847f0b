"""Ranks of one process have a memory each, as processes have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.pipelining.models import TRANSFORMER
from tests.pipelining.running import assert_equal, cut
from torch import nn

from partita.errors import ExecutionError
from partita.pipelining import Schedule1F1B, SplitPoint, build_stage, pipeline
from partita.pipelining.stages import Stage
from partita.pipelining.stages.placing.own_memory import with_own_memory
from partita.runtime import Comm, InProcessWorld


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)).tanh())  # type: ignore[no-any-return]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_an_optimizer_on_each_rank_steps_a_tied_weight_once(frontend: Any) -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 20, (8, 6))
    whole = copy.deepcopy(model)
    split = {"middle": SplitPoint.BEGINNING, "head": SplitPoint.BEGINNING}
    pipe = pipeline(model, (ids[:2],), split_spec=split, frontend=frontend)

    def train(comm: Comm) -> dict[str, torch.Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, loss_fn=_loss)
        optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.01)
        for _ in range(3):
            schedule.step(*((ids,) if comm.rank == 0 else ()), target=ids)
            optimizer.step()
            optimizer.zero_grad()
        return dict(stage.module.state_dict())

    states = InProcessWorld(3).run(train)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for _ in range(3):
        for part in ids.chunk(4):
            (_loss(whole(part), part) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in states:
        assert_equal(state, {name: whole.state_dict()[name] for name in state})


def test_two_stages_on_one_rank_share_a_tied_weight_and_the_first_rank_has_the_models_own() -> None:
    ids = torch.randint(0, 20, (8, 6))
    split = dict.fromkeys(("middle", "head"), SplitPoint.BEGINNING)
    pipe = pipeline(model := Tied(), (ids[:2],), split_spec=split)

    def build(comm: Comm) -> list[Stage]:
        mine = (1,) if comm.rank == 0 else (2, 0)
        return [pipe.build_stage(index, comm=comm) for index in mine]

    (middle,), (last, first) = InProcessWorld(2).run(build)
    assert middle.module is pipe.get_stage_module(1)
    assert last.module.get_parameter("head.weight") is first.module.get_parameter("embedding.weight")
    assert first.module.get_parameter("embedding.weight") is model.embedding.weight


def test_copies_of_one_stage_on_two_ranks_train_apart() -> None:
    pipe = cut(TRANSFORMER, 1)

    def build(comm: Comm) -> nn.Module:
        pair = [pipe.build_stage(0, comm=comm).module for _ in range(2)]
        assert_equal(dict(pair[0].state_dict()), dict(pair[1].state_dict()))
        for parameter in pair[0].parameters():
            parameter.data.fill_(comm.rank)
        assert all(map(torch.equal, pair[0].parameters(), pair[1].parameters()))
        return pair[0]

    first, second = InProcessWorld(2).run(build)
    assert all(bool((parameter == 0).all()) for parameter in first.parameters())
    assert all(bool((parameter == 1).all()) for parameter in second.parameters())


def test_without_another_rank_and_on_the_meta_device_modules_stay_as_they_are() -> None:
    assert with_own_memory(model := Tied(), None) is model
    with torch.device("meta"):
        model = Tied()
    assert InProcessWorld(2).run(lambda comm: with_own_memory(model, comm) is model) == [True, True]


def test_a_wrapped_module_that_would_have_to_be_copied_is_refused() -> None:
    pipe = cut(TRANSFORMER, 2)

    def build(comm: Comm) -> Any:
        wrapped: Any = torch.compile(pipe.get_stage_module(comm.rank), backend="eager")
        return build_stage(wrapped, comm.rank, pipe.info(), comm=comm)

    with pytest.raises(ExecutionError, match=r"held by another rank .*build the stage first"):
        InProcessWorld(2).run(build)


def test_hooks_of_a_weight_that_two_ranks_hold_are_on_both_copies() -> None:
    model = Tied()
    model.embedding.weight.register_hook(lambda gradient: 0 * gradient)

    def held_here(comm: Comm) -> list[float]:
        weight: Any = with_own_memory(model, comm).get_parameter("embedding.weight")
        weight.sum().backward()
        assert (weight is model.embedding.weight) == (comm.rank == 0)
        return weight.grad.unique().tolist()  # type: ignore[no-any-return]

    assert InProcessWorld(2).run(held_here) == [[0], [0]]
