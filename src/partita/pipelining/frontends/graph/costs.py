"""From measured nodes to the units that the planner cuts between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from partita.capture.module_paths import module_path
from partita.capture.sizes import Sizes
from partita.graph.attributes import lookup
from partita.graph.cost import NodeCost
from partita.graph.liveness import Border, borders
from partita.pipelining.frontends.graph.branches import branch_nodes
from partita.planning import CostModel, Unit

__all__ = ["cost_model", "cost_models", "narrow_borders"]

_WINDOWS = (64, 16, 4, 0)
"""How many borders to either side a border is compared with; the first that gives enough units counts."""


def cost_models(gm: GraphModule, measured: Sequence[NodeCost]) -> Iterator[tuple[CostModel, list[int]]]:
    """Make `cost_model`s for smaller and smaller units.

    In a small model a value may go past all blocks (to scale the result back, say). Borders before that value
    is made are narrower then than those between the blocks, and only a small window leaves the latter.
    """
    for window in _WINDOWS:
        yield cost_model(gm, measured, window)


def cost_model(
    gm: GraphModule, measured: Sequence[NodeCost], window: int = _WINDOWS[0]
) -> tuple[CostModel, list[int]]:
    """Return the units between the narrow borders of a graph, with their costs added up.

    Args:
        window: see `narrow_borders`.

    Returns:
        The cost model, and for each of its borders the position of the node that it comes after.
    """
    nodes = list(gm.graph.nodes)
    index = {node: position for position, node in enumerate(nodes)}
    not_sent = {*Sizes.of(gm).numbers, *(node.name for node in branch_nodes(gm))}
    counted = borders(nodes, index, ignored=not_sent)
    # A result goes straight from where it is made to the end: it does not tell one place to cut from another.
    passing = borders(nodes, index, ignored=not_sent, results=False)
    chosen = {gap.after for gap in narrow_borders(nodes, passing, window)}
    gaps = [gap for gap in counted if gap.after in chosen]
    cuts = [gap.after for gap in gaps]
    costs = {cost.name: cost for cost in measured}
    units: list[Unit] = []
    start = 0
    for end in [*cuts, len(nodes) - 1]:
        units.append(_unit(gm, nodes[start : end + 1], costs, len(units)))
        start = end + 1
    return CostModel(tuple(units), tuple(gap.bytes for gap in gaps)), cuts


def narrow_borders(nodes: Sequence[Node], gaps: Sequence[Border], window: int = _WINDOWS[0]) -> list[Border]:
    """Return the borders at which a cut makes sense: only tensors cross, and fewer cross at no neighbouring
    border.

    Between two transformer blocks one tensor crosses, within a block two or more; in the middle of a U-Net
    all of its skips do. Operations lie on both sides.

    Args:
        window: how many borders to either side count as neighbours.
    """
    computes = [node.op.startswith("call_") and node.target is not torch.is_grad_enabled for node in nodes]
    first = next((position for position, does in enumerate(computes) if does), len(nodes))
    last = max((position for position, does in enumerate(computes) if does), default=-1)
    inner = [gap for gap in gaps if first <= gap.after < last and not gap.others and gap.tensors]
    least = _window_minima([gap.tensors for gap in inner], window)
    chosen = [gap for gap, fewest in zip(inner, least, strict=True) if gap.tensors == fewest]
    # Of several borders in a row with nothing computed between them, one is enough.
    apart: list[Border] = []
    for gap in chosen:
        if not apart or any(computes[apart[-1].after + 1 : gap.after + 1]):
            apart.append(gap)
    return apart


def _window_minima(numbers: Sequence[int], reach: int) -> list[int]:
    """For each place the least number within ``reach`` places to either side, in linear time."""
    minima, candidates, ahead = [], deque[int](), 0
    for place in range(len(numbers)):
        while ahead < min(len(numbers), place + reach + 1):
            while candidates and numbers[candidates[-1]] >= numbers[ahead]:
                candidates.pop()
            candidates.append(ahead)
            ahead += 1
        while candidates[0] < place - reach:
            candidates.popleft()
        minima.append(numbers[candidates[0]])
    return minima


def _unit(gm: GraphModule, nodes: Sequence[Node], costs: dict[str, NodeCost], number: int) -> Unit:
    measured = [costs[node.name] for node in nodes if node.name in costs]
    parameters: dict[int, torch.nn.Parameter] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and isinstance(value := lookup(gm, operand), torch.nn.Parameter):
                parameters[id(value)] = value
    modules = dict.fromkeys(
        path for node in nodes if node.op.startswith("call_") and (path := module_path(node))
    )
    named = [node.name for node in nodes if node.op.startswith("call_")]
    return Unit(
        name=f"{number}:{named[-1] if named else 'inputs'}",
        forward_s=sum(cost.forward_s for cost in measured),
        backward_s=sum(cost.backward_s for cost in measured),
        parameter_bytes=sum(value.numel() * value.element_size() for value in parameters.values()),
        parameters=sum(value.numel() for value in parameters.values()),
        activation_bytes=sum(cost.output_bytes for cost in measured),
        modules=tuple(modules),
    )
