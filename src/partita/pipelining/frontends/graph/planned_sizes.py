"""Whether a plan was made for a model of these sizes: wider layers have the same operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.fx import GraphModule

from partita.errors import PlanError
from partita.graph.attributes import lookup
from partita.planning import Plan

__all__ = ["check_sizes"]


def check_sizes(plan: Plan, gm: GraphModule, ends: Sequence[int]) -> None:
    """Check that the stages of a plan have as many parameters as those of this graph.

    Args:
        ends: the positions of the nodes that units end with, all but the last.

    Raises:
        PlanError: they have more or fewer.
    """
    nodes = list(gm.graph.nodes)
    borders = [-1, *ends, len(nodes) - 1]
    for stage in plan.stages:
        parameters: dict[int, int] = {}
        for node in nodes[borders[stage.first_unit] + 1 : borders[stage.last_unit + 1] + 1]:
            for operand in node.all_input_nodes:
                value = lookup(gm, operand) if operand.op == "get_attr" else None
                if isinstance(value, nn.Parameter):
                    parameters[id(value)] = value.numel()
        count = sum(parameters.values())
        if count != stage.parameters:
            raise PlanError(
                f"the plan was made for a model with {stage.parameters:,} parameters in stage {stage.index}, "
                f"and this one has {count:,} there: measure and plan again (plan='auto' does)"
            )
