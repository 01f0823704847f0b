"""A loop over modules that finds the batch norms of a captured stage hears that it changes nothing there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from partita.errors import ArgumentError
from partita.pipelining import Pipe, Schedule1F1B, SplitPoint, pipeline
from partita.runtime import InProcessWorld

BATCHES = [torch.randn(8, 4) for _ in range(3)]


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))


@pytest.fixture
def pipe(model: nn.Module) -> Pipe:
    return pipeline(model, (BATCHES[0][:2],), split_spec={"2": SplitPoint.BEGINNING})


def _momentum(pipe: Pipe) -> None:
    for module in pipe.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda pipe: update_bn(BATCHES, pipe), r"reset_running_stats\(\)"),
        (lambda pipe: update_bn(BATCHES, AveragedModel(pipe)), r"reset_running_stats\(\)"),
        (lambda pipe: update_bn(BATCHES, pickle.loads(pickle.dumps(pipe))), r"reset_running_stats\(\)"),
        (lambda pipe: update_bn(BATCHES, pipe.build_stage(1).module), r"reset_running_stats\(\)"),
        (nn.SyncBatchNorm.convert_sync_batchnorm, "convert_sync_batchnorm"),
        (_momentum, "momentum = 0.5"),
    ],
    ids=["update_bn", "averaged", "unpickled", "stage", "synchronised", "momentum"],
)
def test_what_would_have_no_effect_is_refused(pipe: Pipe, change: Callable[[Any], object], text: str) -> None:
    """Each did nothing, without a word: statistics stayed those of other weights, or of each rank."""
    with pytest.raises(ArgumentError, match=rf"gets .*{text}.*has no effect on the stage's graph"):
        change(pipe)


def test_statistics_that_the_model_computes_anew_are_the_pipes(model: nn.Module, pipe: Pipe) -> None:
    reference = copy.deepcopy(model)
    for module in (model, reference):
        update_bn(BATCHES, module)
    assert torch.equal(pipe.eval()(BATCHES[0]), reference.eval()(BATCHES[0]))


def test_stages_show_save_load_and_train_as_before(model: nn.Module, pipe: Pipe) -> None:
    reference = copy.deepcopy(model)
    copied = copy.deepcopy(pipe)
    assert "Norm()" in str(copied.get_stage_module(0))

    def body(comm: Any) -> dict[str, torch.Tensor]:
        stage = copied.build_stage(comm.rank, comm=comm)
        stage.module.load_state_dict(dict(stage.module.state_dict()))
        Schedule1F1B(stage, 1, nn.functional.mse_loss).step(BATCHES[0], target=BATCHES[1])
        return dict(stage.module.state_dict())

    reference(BATCHES[0])
    after = {name: value for part in InProcessWorld(2).run(body) for name, value in part.items()}
    assert after.keys() == reference.state_dict().keys()
    assert all(torch.equal(value, after[name]) for name, value in reference.state_dict().items())
