"""The check that a model does not decide by a random number of torch what it runs, as layerdrop does.

A graph has one way only through ``if torch.rand([]) < 0.05: continue``, and most runs take it: it would be
proven, and fail in whichever step draws the other way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from partita.errors import CaptureError
from partita.graph.ancestors import ancestors
from partita.graph.effect_rules.conditions import require_condition

__all__ = ["check_drawn_branches"]

_LARGEST = 1 - 2**-8
"""Of the numbers below 1 that every dtype has."""


def check_drawn_branches(model: nn.Module, module: GraphModule) -> None:
    """Refuse a graph of which the way depends on numbers that `torch.rand` draws, and on nothing else. One
    whose answer is always the same (a rate of 0) is right.

    Raises:
        CaptureError: names the line that asks.
    """
    for check in module.graph.find_nodes(op="call_function", target=require_condition):
        condition, _, place, _ = check.args
        assert isinstance(condition, Node)
        seen = ancestors([condition])
        before = [node for node in module.graph.nodes if node in seen]
        draws = [node for node in before if node.target is torch.ops.aten.rand.default]
        if not draws or any(node.op != "call_function" for node in before):
            continue
        if _value(condition, before, 0.0) is not _value(condition, before, _LARGEST):
            raise CaptureError(
                f"{type(model).__name__} draws a random number to decide what it runs (at {place}), and a "
                "graph has one way only. Where this drops layers, set its rate to 0 (layerdrop=0.0 in a "
                "configuration); or draw which samples keep a layer, and multiply; or cut the model at its "
                'blocks, which leaves its code as it is: pipeline(..., frontend="modules"); or, where '
                "evaluation is all that is needed, modes='eval'"
            )


def _value(node: Node, before: Iterable[Node], drawn: float) -> Any:
    """The value of a node where every random number is this one."""
    values: dict[Node, Any] = {}
    for each in before:
        if each.target is torch.ops.aten.rand.default:
            value = each.meta["val"]
            values[each] = torch.full(tuple(value.shape), drawn, dtype=value.dtype)
        else:
            assert callable(each.target)
            args, kwargs = map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = each.target(*args, **kwargs)
    return values[node]
