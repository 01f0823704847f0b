"""A stage that was built with a group or a comm could not be copied: cannot pickle 'ProcessGroup' object."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from tests.group_of_one import group_of_one
from torch import nn

from partita.errors import ArgumentTypeError
from partita.pipelining import PipelineStage, ScheduleGPipe
from partita.runtime import Comm, InProcessWorld


def test_copies_of_stages_talk_to_the_same_ranks_and_train_apart() -> None:
    def body(comm: Comm) -> None:
        torch.manual_seed(comm.rank)
        stage = PipelineStage(nn.Linear(3, 3), comm.rank, 2, torch.device("cpu"), comm=comm)
        twin = copy.deepcopy(stage)
        assert twin.comm is copy.copy(stage).comm is comm
        x = torch.ones(4, 3)
        for one in (stage, twin):
            ScheduleGPipe(one, 2, nn.MSELoss()).step(x, target=x)
        assert twin.module is not stage.module
        assert torch.equal(twin.module.weight.grad, stage.module.weight.grad)

    InProcessWorld(2).run(body)


def test_a_stage_is_pickled_without_its_group() -> None:
    with group_of_one():
        stage = PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu"), group=dist.group.WORLD)
        assert copy.deepcopy(stage).group is dist.group.WORLD
        with pytest.raises(ArgumentTypeError, match=r"pickled with its group, .*: set stage\.group = None"):
            pickle.dumps(stage)
        stage.group = None
        assert pickle.loads(pickle.dumps(stage)).group is None
