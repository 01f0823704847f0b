"""Parameters and buffers that several stages use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.fx import GraphModule

from partita.errors import CaptureError
from partita.graph.effects import analyse
from partita.graph.state import lookup
from partita.pipelining.routes import Routes, Tied, Value
from partita.pipelining.stage import PipelineStage
from partita.runtime import Comm

__all__ = ["add_aliases", "check_writes", "share_gradients", "tied_parameters"]

_TIED_TAGS = 2**30
"""Far above the tags of values that cross."""


def tied_parameters(modules: Sequence[nn.Module]) -> tuple[Tied, ...]:
    """The parameters that more than one stage holds; equal are those that are the same object."""
    holders: dict[int, tuple[nn.Parameter, dict[str, None], dict[int, None]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            _, names, stages = holders.setdefault(id(parameter), (parameter, {}, {}))
            names[name] = None
            stages[stage] = None
    return tuple(
        Tied(
            tuple(names),
            tuple(stages),
            Value(f"parameter:{next(iter(names))}", tuple(parameter.shape), parameter.dtype, parameter.requires_grad),
        )
        for parameter, names, stages in holders.values()
        if len(stages) > 1
    )


def add_aliases(module: nn.Module, aliases: Sequence[tuple[str, ...]]) -> None:
    """Give a stage that holds one name of a tied parameter all of its names, so that a checkpoint of the whole model, which
    has every name, can be put together from the stages."""
    held = dict(module.named_parameters(remove_duplicate=False))
    for names in aliases:
        known = next((held[name] for name in names if name in held), None)
        if known is None:
            continue
        for name in names:
            if name not in held:
                _set_parameter(module, name, known)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, leaf = name.split(".")
    for atom in path:
        child = getattr(module, atom, None)
        if child is None:
            child = nn.Module()
            module.add_module(atom, child)
        module = child
    module.register_parameter(leaf, parameter)


def check_writes(gm: GraphModule, assignment: dict[str, int]) -> None:
    """Refuse a cut through memory that is written: stages run in processes of their own and don't share it.

    Raises:
        CaptureError: names the node that writes, the tensor, and the stages.
    """
    effects = analyse(gm)
    if not effects.storages:
        return
    touching: dict[int, dict[int, str]] = {}
    for node in effects.nodes:
        if node.name not in assignment:
            continue
        for operand in node.all_input_nodes:
            for identity in effects.storages[effects.index[operand]]:
                touching.setdefault(identity, {}).setdefault(assignment[node.name], operand.name)
    for position in effects.writers:
        node = effects.nodes[position]
        for operand in effects.uses[position].writes:
            for identity in effects.storages[effects.index[operand]]:
                stages = touching.get(identity, {})
                if len(stages) > 1:
                    raise CaptureError(
                        f"{node.name!r} writes to {_state_name(gm, operand)} in stage {assignment[node.name]}, and stages "
                        f"{sorted(stages)} use the same memory, which they can't share across processes: cut so that one stage "
                        "has all of its uses, or write to a copy"
                    )


def _state_name(gm: GraphModule, operand: torch.fx.Node) -> str:
    if operand.op == "get_attr" and isinstance(lookup(gm, operand), torch.Tensor):
        return f"the buffer {operand.target!r}"
    return f"the value {operand.name!r}"


def share_gradients(
    comm: Comm, stages: Mapping[int, PipelineStage], stage_ranks: tuple[int, ...], routes: Routes
) -> None:
    """Give every holder of a tied parameter the gradient that its owner has summed, at the end of a step.

    The owner is the first stage that holds it. All copies then have the same gradient, so an optimizer keeps them equal.
    """
    handles = []
    received: list[tuple[nn.Parameter, torch.Tensor]] = []
    for number, group in enumerate(routes.tied):
        if not group.value.requires_grad:
            continue
        owner, *holders = group.stages
        for holder in holders:
            source, destination = stage_ranks[owner], stage_ranks[holder]
            if source == destination and source == comm.rank:
                _parameter(stages[holder], group).grad = _parameter(stages[owner], group).grad
            elif source == comm.rank:
                gradient = _parameter(stages[owner], group).grad
                assert gradient is not None
                handles.append(comm.send(gradient, destination, _TIED_TAGS + number))
            elif destination == comm.rank:
                parameter = _parameter(stages[holder], group)
                buffer = torch.empty_like(parameter)
                handles.append(comm.recv(buffer, source, _TIED_TAGS + number))
                received.append((parameter, buffer))
    for handle in handles:
        handle.wait()
    for parameter, buffer in received:
        parameter.grad = buffer


def _parameter(stage: PipelineStage, group: Tied) -> nn.Parameter:
    return next(parameter for other, parameter in stage.tied if other is group)
