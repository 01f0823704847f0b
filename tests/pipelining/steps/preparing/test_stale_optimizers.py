"""Optimizers with the parameters that a stage had before it was moved, sharded or materialised."""

from __future__ import annotations

import pytest
import torch
from tests.group_of_one import group_of_one
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import SGD, Optimizer

from partita.errors import ExecutionError
from partita.pipelining import Pipe, Schedule1F1B, SplitPoint, materialise, pipeline
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, InProcessWorld

STALE = r"the optimizer has '0.weight' of the model that was cut, and stage 0 trains another tensor"


def _pipe(model: nn.Module, x: Tensor) -> Pipe:
    return pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING}, prove=False)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _step(stage: Stage, x: Tensor) -> Schedule1F1B:
    schedule = Schedule1F1B(stage, 2, functional.mse_loss)
    schedule.step(x, target=torch.zeros(4, 4))
    return schedule


@pytest.mark.parametrize("is_new", [True, False])
def test_an_optimizer_that_was_made_before_its_stage_was_materialised(is_new: bool) -> None:
    """Its steps did nothing, without a word."""

    def body(comm: Comm) -> bool:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        stage = _pipe(model, torch.empty(4, 4, device="meta")).build_stage(comm.rank, comm=comm)
        optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
        materialise(stage)
        for parameter in stage.module.parameters():
            nn.init.constant_(parameter, 0.5)
        schedule = _step(stage, torch.ones(4, 4))
        if is_new:
            optimizer = SGD(stage.module.parameters(), lr=0.1)
        optimizer.step()
        del schedule
        return all(bool((parameter != 0.5).any()) for parameter in stage.module.parameters())

    world = InProcessWorld(2)
    if is_new:
        assert world.run(body) == [True, True]
        return
    with pytest.raises(ExecutionError, match=r"has '\d.weight' .* stage.module.parameters\(\), aft"):
        world.run(body)


def test_an_optimizer_that_was_made_before_its_stage_was_sharded() -> None:
    with group_of_one():
        x, model = torch.ones(4, 4), nn.Sequential(_model())
        stage = pipeline(model, (x[:2],), split_spec={}, prove=False).build_stage(0)
        optimizer = SGD(stage.module.parameters(), lr=0.1)
        fully_shard(stage.module)
        schedule = _step(stage, x)
        with pytest.raises(ExecutionError, match=STALE.replace("'0.weight", "'0.0.weight")):
            optimizer.step()
        SGD(stage.module.parameters(), lr=0.1).step()
        schedule.close()


def test_optimizers_that_have_the_parameters_of_other_stages_too_are_let_through() -> None:
    """Those have no gradients here, and their own rank steps them."""
    model, x = _model(), torch.ones(4, 4)
    pipe = _pipe(model, x)

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = _step(stage, x)
        comm.barrier()
        for parameters in (model.parameters(), model[0].parameters(), model[1].parameters()):
            SGD(parameters, lr=0.0).step()
        comm.barrier()
        del schedule

    InProcessWorld(2).run(body)
