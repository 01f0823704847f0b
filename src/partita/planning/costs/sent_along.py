"""What stages send along which edge, in bytes of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.costs.stage_cost import StageCost

__all__ = ["sent_along"]

_Sizes = dict[tuple[int, int], int]


def sent_along(costs: Sequence[StageCost]) -> tuple[_Sizes, _Sizes]:
    """The bytes of values and those of gradients by (stage that sends, stage that takes), for stages on ranks
    of their own; gradients of tied parameters are left out.

    >>> sent_along([StageCost(1.0, 2.0, send_bytes=8), StageCost(1.0, 2.0, send_grad_bytes=4)])
    ({(0, 1): 8}, {(1, 0): 4})
    >>> skip = [StageCost(1, 2, sent_values=((2, 8),)), StageCost(1, 2, sent_values=()), StageCost(1, 2)]
    >>> sent_along(skip)
    ({(0, 2): 8}, {(2, 1): 0})
    """
    values: _Sizes = {}
    gradients: _Sizes = {}
    last = len(costs) - 1
    for stage, cost in enumerate(costs):
        if cost.sent_values is not None:
            values |= {(stage, to): size for to, size in cost.sent_values}
            gradients |= {(stage, to): size for to, size in cost.handed_gradients}
            continue
        if stage < last:
            values[stage, stage + 1] = cost.send_bytes
        if stage:
            gradients[stage, stage - 1] = cost.gradient_bytes(costs[stage - 1])
    return values, gradients
