"""Autocast's cache of converted weights: which nodes share an entry.

Within an outermost autocast region torch converts a weight once and hands the same copy to every later use;
leaving the region empties the cache. So the gradients of those uses are summed in low precision before they
reach the weight, and a weight that is changed in between is used as it was. Uses of one weight in one region
therefore belong together::

    enter A    mm(x, w)   mm(y, w)    exit    one conversion for both
    enter B    mm(z, w)               exit    another
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import ENTER_AUTOCAST
from partita.graph.attributes import lookup
from partita.graph.effects import Effects, metadata
from partita.graph.regions import Ambient

__all__ = ["Casts", "find_casts"]


@dataclass(frozen=True)
class Casts:
    """What autocast may cache in one graph.

    Attributes:
        regions: for each position the node that enters the outermost autocast region around it, or None.
        shared: for each weight and region, the positions of the weight's users there, if several.
    """

    regions: list[Node | None]
    shared: list[tuple[int, ...]]


def find_casts(gm: GraphModule, effects: Effects, ambients: Sequence[Ambient]) -> Casts:
    """Return who uses the tensors that autocast may cache: parameters, and inputs that may require grad."""
    regions = [outermost_autocast(ambient) for ambient in ambients]
    users: dict[tuple[Node, object], list[int]] = {}
    for position, node in enumerate(effects.nodes):
        region = regions[position]
        if region is None or node.op in ("placeholder", "get_attr", "output"):
            continue
        for key in dict.fromkeys(_weights(gm, node)):
            users.setdefault((region, key), []).append(position)
    shared = [tuple(positions) for positions in users.values() if len(positions) > 1]
    return Casts(regions, shared)


def outermost_autocast(ambient: Ambient) -> Node | None:
    """Return the node that enters the outermost open autocast region, or None."""
    return next((switch for switch in ambient.stack if switch.target is ENTER_AUTOCAST), None)


def _weights(gm: GraphModule, node: Node) -> Iterator[object]:
    """Keys of the operands that autocast may cache: floating tensors that are leaves and require grad."""
    if node.op == "call_module":
        module = lookup(gm, node)
        if isinstance(module, torch.nn.Module):
            yield from (id(parameter) for parameter in module.parameters())
    for operand in node.all_input_nodes:
        if operand.op == "get_attr":
            value = lookup(gm, operand)
            if isinstance(value, torch.Tensor) and (
                value.requires_grad or isinstance(value, torch.nn.Parameter)
            ):
                yield id(value)
        elif operand.op == "placeholder":
            value = metadata(operand)
            if value is None or (isinstance(value, torch.Tensor) and value.requires_grad):
                yield operand
        elif operand.target == "requires_grad_" or "requires_grad" in operand.kwargs:
            yield operand
