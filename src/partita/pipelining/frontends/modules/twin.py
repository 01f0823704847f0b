"""Copies of a model, for what runs it aside and for its stages, whose tensors are chosen one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.modules.closure_copy import with_closures
from partita._torch.modules.contents import named_state
from partita.errors import CaptureError
from partita.pipelining.blocks.stage_module import named_tensors

__all__ = ["own_parameters", "twin_of"]


def twin_of(model: nn.Module, instead: Mapping[int, Tensor], *, unnamed_shared: bool = False) -> nn.Module:
    """Return a copy of ``model`` with parameters of its own, in the memory of the model's, and copies of its
    other tensors.

    Args:
        instead: other tensors, by the identity of those whose places they take.
        unnamed_shared: tensors that no module has a name for (in a list, in a module in a list) are not
            copied: gradients arrive at the model's own.

    Raises:
        CaptureError: ``model`` holds something that can't be copied, or that copies tensors in its own way.
    """
    state = dict(named_state(model))  # kept: a class may make what it yields
    own: dict[int, Any] = {**own_parameters(model)}
    for _, tensor in named_tensors(model):
        if not isinstance(tensor, nn.Parameter):
            copied = tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)
            own.setdefault(id(tensor), copied)
    own.update(instead)
    try:
        with with_closures(others_shared=True, tensors_shared=unnamed_shared) as memo:
            memo.update(own)
            twin: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # whatever __deepcopy__ and __reduce__ raise
        raise CaptureError(
            f"{type(model).__name__} holds something that can't be copied ({type(error).__name__}: {error}), "
            'and frontend="modules" gives each stage a copy of the model without the others\' parameters: '
            "make it in forward, or give its class a __deepcopy__"
        ) from error
    copies = dict(named_state(twin))
    for name, tensor in state.items():
        if id(tensor) in own and copies.get(name) is not own[id(tensor)]:
            raise CaptureError(
                f"a copy of {type(model).__name__} has a tensor of its own for {name!r}: the class that "
                "holds it makes one in its __deepcopy__ without a look at memo (tensordict's does), and "
                'frontend="modules" gives each stage a copy with the parameters of that stage. '
                f"{_way_out(model.get_submodule(name.rpartition('.')[0]))}"
            )
    return twin


def _way_out(holder: nn.Module) -> str:
    if isinstance(holder, torch.jit.ScriptModule):
        return "It is a module of torch.jit: put the module there that it was made from"
    return (
        "Leave frontend= out, which cuts the captured graph, or let __deepcopy__ hand its memo on to "
        "copy.deepcopy"
    )


def own_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return another parameter in the memory of each of the model's, by the identity of that one.

    A copy of the model may replace its ``data`` or change its ``requires_grad``; the model's own stays as it
    is. Hooks and gradients are left out.
    """
    return {id(parameter): _own_parameter(parameter) for parameter in model.parameters()}


def _own_parameter(parameter: nn.Parameter) -> nn.Parameter:
    own: nn.Parameter = nn.Parameter.__new__(type(parameter), parameter.data, parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(own).setdefault(name, value)
    return own
