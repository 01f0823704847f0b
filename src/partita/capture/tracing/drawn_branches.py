"""The check that a model does not decide by a random number of torch what it runs, as layerdrop does.

A graph has one way only through ``if torch.rand([]) < 0.05: continue``, and most runs take it: it would be
proven, and fail in whichever step draws the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from partita.errors import CaptureError
from partita.graph.ancestors import ancestors
from partita.graph.effect_rules.conditions import require_condition

__all__ = ["check_drawn_branches"]

_AT_MOST_BELOW_ONE = 1 - 2**-8
"""Of the numbers below 1 that every dtype has."""
_FAR_OUT = 6.0
"""Standard deviations that a normal number is tried to be away from its mean."""


def check_drawn_branches(model: nn.Module, module: GraphModule) -> None:
    """Refuse a graph of which the way depends on numbers that torch draws, and on nothing else. One
    whose answer is always the same (a rate of 0) is right.

    Raises:
        CaptureError: names the line that asks.
    """
    for check in module.graph.find_nodes(op="call_function", target=require_condition):
        condition, _, place, _ = check.args
        assert isinstance(condition, Node)
        seen = ancestors([condition])
        before = [node for node in module.graph.nodes if node in seen]
        draws = [node for node in before if getattr(node.target, "overloadpacket", None) in _ENDS]
        if not draws or any(node.op != "call_function" for node in before):
            continue
        if _value(condition, before, 0) is not _value(condition, before, 1):
            raise CaptureError(
                f"{type(model).__name__} draws a random number to decide what it runs (at {place}), and a "
                "graph has one way only. Where this drops layers, set its rate to 0 (layerdrop=0.0 in a "
                "configuration); or draw which samples keep a layer, and multiply; or cut the model at its "
                'blocks, which leaves its code as it is: pipeline(..., frontend="modules"); or, where '
                "evaluation is all that is needed, modes='eval'"
            )


def _value(node: Node, before: Iterable[Node], end: Literal[0, 1]) -> Any:
    """The value of a node where every random number is the lowest, or the highest, that it may be."""
    values: dict[Node, Any] = {}
    for each in before:
        assert callable(each.target)
        args, kwargs = map_arg((each.args, each.kwargs), values.__getitem__)
        ends = _ENDS.get(getattr(each.target, "overloadpacket", None))
        if ends is None:
            values[each] = each.target(*args, **kwargs)
        else:
            value = each.meta["val"]
            number = torch.as_tensor(ends(*args)[end]).to(value.dtype)
            values[each] = number.expand(tuple(value.shape)).clone()
    return values[node]


def _uniform(low: float = 0.0, high: float = 1.0) -> tuple[Any, Any]:
    return low, low + (high - low) * _AT_MOST_BELOW_ONE


def _bernoulli(rate: Any = 0.5) -> tuple[Any, Any]:
    return torch.as_tensor(rate) >= 1, torch.as_tensor(rate) > 0


def _normal(mean: Any = 0.0, std: Any = 1.0) -> tuple[Any, Any]:
    return mean - _FAR_OUT * std, mean + _FAR_OUT * std


def _integer(*bounds: int) -> tuple[Any, Any]:
    *low, high = bounds
    return (low[0] if low else 0), high - 1


_ENDS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    torch.ops.aten.rand: lambda _size: _uniform(),
    torch.ops.aten.rand_like: lambda _like: _uniform(),
    torch.ops.aten.uniform_: lambda _filled, *bounds: _uniform(*bounds),
    torch.ops.aten.bernoulli: lambda rates, *rate: _bernoulli(*(rate or [rates])),
    torch.ops.aten.bernoulli_: lambda _filled, *rate: _bernoulli(*rate),
    torch.ops.aten.randn: lambda _size: _normal(),
    torch.ops.aten.randn_like: lambda _like: _normal(),
    torch.ops.aten.normal_: lambda _filled, *moments: _normal(*moments),
    torch.ops.aten.randint: lambda *bounds_and_size: _integer(*bounds_and_size[:-1]),
}
"""What draws, and from its arguments the lowest and the highest number that it may draw."""
