"""The modules of the stages: copies of a model's structure, each with the state of its own stage."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn

from partita._torch.modules.calls import watch_calls
from partita._torch.modules.contents import named_state
from partita.pipelining.blocks.stage_module import StageModule, entering, ghost_in_place_of, leaving
from partita.pipelining.frontends.modules.borders import BlockPlan
from partita.pipelining.frontends.modules.twin import twin_of
from partita.pipelining.stages.placing.materialise import tensor_slots
from partita.pipelining.stages.placing.relocate import relocated

__all__ = ["moved", "stage_modules_of"]


def stage_modules_of(model: nn.Module, plan: BlockPlan) -> list[StageModule]:
    """Return one module for each stage. Parameters and buffers are the model's own, other attributes copies.

    Raises:
        CaptureError: the model holds something that can't be copied.
    """
    return [_module(model, plan, stage) for stage in range(plan.cut.stages)]


def _module(model: nn.Module, plan: BlockPlan, stage: int) -> StageModule:
    ghosts: dict[int, Tensor] = {}
    instead: dict[int, Tensor] = {}
    for name, tensor in named_state(model):
        if stage in plan.holders[name]:
            instead[id(tensor)] = tensor
        elif id(tensor) not in ghosts:
            instead[id(tensor)] = ghosts[id(tensor)] = ghost_in_place_of(tensor)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                instead.setdefault(id(value), value)
    root = twin_of(model, instead, unnamed_shared=True)
    for path, module in root.named_modules():
        watch_calls(module, path, entering, leaving)
    device = next((tensor.device for _, tensor in named_state(model)), torch.device("cpu"))
    return StageModule(root, stage, plan.cut, device, ghosts.values())


def moved(module: StageModule, device: torch.device) -> StageModule:
    """Return ``module`` itself where all of it is on ``device``; otherwise a copy there, with tensors of its
    own. Tensors without memory are left for ``materialise``.
    """
    module_there = cast("StageModule", relocated(module, device, ()))
    if module_there.home == device:
        return module_there
    if module_there is module:
        module_there = copy.deepcopy(module, {id(tensor): tensor for *_, tensor in tensor_slots(module)})
    module_there.move_home(device)
    return module_there
