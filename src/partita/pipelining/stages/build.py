"""From a stage's module to a stage that a rank can run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from partita.errors import ArgumentError, StageIndexError
from partita.pipelining.interface.pipe_info import PipeInfo
from partita.pipelining.stages.graph_stage import GraphStage
from partita.pipelining.stages.placing.own_memory import with_own_memory
from partita.pipelining.stages.placing.relocate import relocated
from partita.pipelining.stages.placing.state_of_stage import stage_modules
from partita.runtime import Comm
from partita.runtime.comms.group_or_comm import check_group_or_comm

__all__ = ["build_stage"]


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    comm: Comm | None = None,
) -> GraphStage:
    """Return a stage around a module from ``Pipe.get_stage_module``, which may have been wrapped since (in
    torch's DDP, or compiled).

    Args:
        stage_index: which stage it is.
        pipe_info: from ``Pipe.info()``.
        device: where it runs (see ``Pipe.build_stage``); a module that is wrapped stays where it is.
        group: the process group of the pipeline's ranks.
        comm: the comm of the pipeline's ranks, in place of ``group``.

    Raises:
        StageIndexError: there is no such stage.
        ArgumentError: both ``group`` and ``comm``, or one that is not what its name says.

    >>> from partita.pipelining import SplitPoint, pipeline
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> pipe = pipeline(model, (torch.zeros(1, 2),), split_spec={"0": SplitPoint.END})
    >>> build_stage(pipe.get_stage_module(1), 1, pipe.info(), "cpu").index
    1
    """
    if not 0 <= stage_index < pipe_info.num_stages:
        raise StageIndexError(
            f"there is no stage {stage_index}: this pipe has stages 0 to {pipe_info.num_stages - 1}"
        )
    check_group_or_comm(group, comm)
    if pipe_info.signature is None:
        raise ArgumentError(
            'the stages of frontend="modules" are plain modules: call the pipe\'s own build_stage(), or make '
            "a PipelineStage of the module"
        )
    (inner,) = stage_modules(stage_module)
    if device is not None and inner is stage_module:
        inner = stage_module = relocated(stage_module, torch.device(device), pipe_info.homes)
    own = with_own_memory(inner, comm, wrapped=inner is not stage_module)
    if inner is stage_module:
        stage_module = own
    home = _home(pipe_info) if device is None else torch.device(device)
    stage = GraphStage(own, stage_index, pipe_info.routes, pipe_info.signature, home, comm=comm)
    stage.module = stage_module
    stage.group = group
    stage.loss_fn = pipe_info.loss
    stage.example = pipe_info.example
    stage.recompute = stage_index in pipe_info.recompute
    if pipe_info.compile_options is not None:
        stage.compile_with(pipe_info.compile_options)
    return stage


def _home(pipe_info: PipeInfo) -> torch.device:
    """Where a stage without tensors of its own runs: where the model's tensors were when it was captured."""
    homes = sorted((home for home in pipe_info.homes if home.type not in ("cpu", "meta")), key=str)
    return homes[0] if homes else torch.device("cpu")
