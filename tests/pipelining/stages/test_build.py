from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.group_of_one import group_of_one
from tests.pipelining.models import PLAIN, TRANSFORMER
from tests.pipelining.running import assert_equal, cut
from torch import nn

from partita.pipelining import Schedule1F1B, SplitPoint, build_stage, pipeline
from partita.pipelining.stages import PipeInfo
from partita.runtime import Comm, InProcessWorld


def test_a_stage_from_the_function_is_that_of_the_pipe() -> None:
    pipe = cut(TRANSFORMER, 2)
    args, _, target = TRANSFORMER.data(8)

    def body(comm: Comm, own: bool) -> list[torch.Tensor]:
        copied = copy.deepcopy(pipe)
        if own:
            stage = copied.build_stage(comm.rank, comm=comm)
        else:
            module, info = copied.get_stage_module(comm.rank), copied.info()
            stage = build_stage(module, comm.rank, info, "cpu", comm=comm)
        losses: list[torch.Tensor] = []
        Schedule1F1B(stage, 4, TRANSFORMER.loss).step(*args, target=target, losses=losses)
        return [*losses, *(p.grad for p in stage.module.parameters() if p.grad is not None)]

    assert_equal(InProcessWorld(2).run(body, True), InProcessWorld(2).run(body, False))


def test_a_wrapped_module_stays_wrapped_and_its_tied_parameters_are_found() -> None:
    pipe = cut(TRANSFORMER, 2)
    with group_of_one():
        wrapped = nn.parallel.DistributedDataParallel(pipe.get_stage_module(0))
        stage = build_stage(wrapped, 0, pipe.info(), "cpu")
        assert stage.module is wrapped
        (group,) = stage.routes.tied
        assert stage.parameter(group) is pipe.get_stage_module(0).get_parameter("embedding.weight")
        del stage, wrapped


def test_info_is_data_and_text_and_keeps_no_module_alive() -> None:
    pipe = cut(PLAIN, 3)
    info = pipe.info()
    assert isinstance(info, PipeInfo)
    assert (info.num_stages, info.has_loss_and_backward) == (3, False)
    calls = [node.target for node in info.graph.find_nodes(op="call_module")]
    assert calls == ["submod_pp_0", "submod_pp_1", "submod_pp_2"]
    assert info.graph.owning_module is None
    assert str(info) == str(pipe)
    assert "stage 1: " in str(info)


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_what_ranks_talk_through_is_checked(frontend: Any) -> None:
    pipe = pipeline(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.zeros(1, 2),), stages=1, frontend=frontend
    )

    def misplaced(comm: Any) -> None:
        with group_of_one(), pytest.raises(ValueError, match="a process group or a comm, not both"):
            pipe.build_stage(0, "cpu", dist.group.WORLD, comm=comm)
        with pytest.raises(ValueError, match=r"group is of type InProcessComm.*give it as comm="):
            pipe.build_stage(0, "cpu", comm)
        with pytest.raises(ValueError, match=r"group is of type InProcessComm.*give it as comm="):
            pipe.schedule(group=comm)

    InProcessWorld(1).run(misplaced)


def test_what_can_not_be_built_is_refused() -> None:
    pipe = cut(PLAIN, 2)
    with pytest.raises(IndexError, match="there is no stage 2: this pipe has stages 0 to 1"):
        build_stage(pipe.get_stage_module(0), 2, pipe.info(), "cpu")


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_stage_without_tensors_of_its_own_is_where_it_was_built_for(frontend: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    spec = {"0": SplitPoint.END, "1": SplitPoint.END}
    pipe = pipeline(model, (torch.zeros(1, 2),), split_spec=spec, frontend=frontend)
    assert pipe.build_stage(1).device == torch.device("cpu")
    assert pipe.build_stage(1, "meta").device == torch.device("meta")


def test_a_stage_without_tensors_of_its_own_is_on_the_models_device() -> None:
    pipe = pipeline(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (torch.zeros(1, 2),), stages=1)
    module, info = pipe.get_stage_module(0), pipe.info()
    gpu, meta = torch.device("cuda:1"), torch.device("meta")
    homes = ({gpu, torch.device("cpu")}, {meta}, set[torch.device]())
    there = [build_stage(nn.Tanh(), 0, replace(info, homes=frozenset(places))).device for places in homes]
    assert there == [gpu, torch.device("cpu"), torch.device("cpu")]
    assert build_stage(module, 0, replace(info, homes=frozenset(homes[0]))).device == torch.device("cpu")
