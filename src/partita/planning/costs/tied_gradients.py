"""What the gradients of tied parameters cost the stages that they go to and come from.

In each microbatch the gradient goes from the last stage that holds the parameters to the first. So all but
the first compute their share in I, with the gradients of their inputs, and not in W::

    stage 0    embedding  <---+        B: the sum; the gradient that was sent is there until then
    stage 1    blocks         |
    stage 2    head  ---------+        B or I: its share, which is there until it has been sent
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from partita.planning.costs.cost_model import CostModel

__all__ = [
    "TiedGradients",
    "reduced_tied_gradients",
    "summed_gradients",
    "tied_gradients",
    "tied_gradients_of",
    "tied_messages",
]


@dataclass(frozen=True)
class TiedGradients:
    """Of a stage, in bytes and seconds of one microbatch.

    Attributes:
        sent: what it sends to earlier stages.
        received: what later ones send to it.
        owned: of these, whose sum is taken here.
        early: for each unit that has a share, which part of its parameters' gradients it computes in I.
    """

    sent: int
    received: int
    owned: int
    early: dict[int, float]


def tied_gradients(costs: CostModel, first: int, last: int) -> TiedGradients:
    """Those of a stage of the units from `first` to `last`.

    >>> from partita.planning import TiedUnits, Unit
    >>> units = tuple(Unit(name, 1.0, 2.0, parameter_bytes=8) for name in "abc")
    >>> costs = CostModel(units, (4, 4), tied=(TiedUnits((0, 2), 8, gradient_bytes=8),))
    >>> tied_gradients(costs, 1, 2)
    TiedGradients(sent=8, received=0, owned=0, early={2: 1.0})
    >>> tied_gradients(costs, 0, 1)
    TiedGradients(sent=0, received=8, owned=8, early={})
    """
    sent = received = owned = 0
    early: dict[int, float] = {}
    for tied in costs.tied:
        is_sent = tied.is_sent(first, last)
        if is_sent:
            sent += tied.gradient_bytes
            for unit in tied.used_in(first, last):
                of_unit = max(costs.units[unit].parameter_bytes, 1)
                early[unit] = min(early.get(unit, 0.0) + tied.gradient_bytes / of_unit, 1.0)
        if tied.is_received(first, last):
            received += tied.gradient_bytes
            owned += 0 if is_sent else tied.gradient_bytes
    return TiedGradients(sent, received, owned, {unit: part for unit, part in early.items() if part})


def tied_messages(costs: CostModel, cuts: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """For each stage, the earlier ones that it sends gradients of tied parameters to, each with their bytes.

    Args:
        costs: of the units.
        cuts: the first unit of each stage, and how many units there are.

    >>> from partita.planning import TiedUnits, Unit
    >>> units = tuple(Unit(name, 1.0, 2.0, parameter_bytes=8) for name in "abc")
    >>> costs = CostModel(units, (4, 4), tied=(TiedUnits((0, 2), 8, gradient_bytes=8),))
    >>> tied_messages(costs, (0, 1, 2, 3))
    [(), (), ((0, 8),)]
    """
    sizes: list[dict[int, int]] = [{} for _ in cuts[1:]]
    for tied in costs.tied:
        holders = dict.fromkeys(bisect_right(cuts, unit) - 1 for unit in tied.units)
        for to, sender in pairwise(holders) if tied.gradient_bytes else ():
            sizes[sender][to] = sizes[sender].get(to, 0) + tied.gradient_bytes
    return [tuple(sorted(of_stage.items())) for of_stage in sizes]


def summed_gradients(costs: CostModel, cuts: Sequence[int]) -> list[tuple[tuple[int, tuple[int, ...]], ...]]:
    """For each stage, the gradients of parameters that it is the first to hold and that are summed once a
    step: the bytes of each, and the later stages that hold the parameter too.

    >>> from partita.planning import TiedUnits, Unit
    >>> units = tuple(Unit(name, 1.0, 2.0, parameter_bytes=8) for name in "abc")
    >>> costs = CostModel(units, (4, 4), tied=(TiedUnits((0, 2), 8, gradient_bytes=8),))
    >>> summed_gradients(reduced_tied_gradients(costs), (0, 1, 2, 3))
    [((8, (2,)),), (), ()]
    """
    sums: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in cuts[1:]]
    for tied in costs.tied:
        first, *later = dict.fromkeys(bisect_right(cuts, unit) - 1 for unit in tied.units)
        if tied.reduced_bytes and later:
            sums[first].append((tied.reduced_bytes, tuple(later)))
    return [tuple(of_stage) for of_stage in sums]


def reduced_tied_gradients(costs: CostModel) -> CostModel:
    """The same costs for a schedule that is made with ``tied_gradients="reduced"``: each stage adds up its
    own share, so no gradient of tied parameters is sent in the step or waits in it, and one sum follows the
    step. Plans made from them say so, and `Pipe.schedule` follows.

    >>> from partita.planning import TiedUnits, Unit
    >>> units = tuple(Unit(name, 1.0, 2.0, parameter_bytes=8) for name in "abc")
    >>> costs = CostModel(units, (4, 4), tied=(TiedUnits((0, 2), 8, gradient_bytes=8),))
    >>> reduced_tied_gradients(costs).tied[0].gradient_bytes
    0
    """
    return replace(
        costs,
        tied=tuple(
            replace(tied, gradient_bytes=0, reduced_bytes=tied.gradient_bytes or tied.reduced_bytes)
            for tied in costs.tied
        ),
    )


def tied_gradients_of(costs: CostModel) -> str:
    """What a schedule for these costs does with gradients of tied parameters."""
    return "reduced" if any(tied.reduced_bytes for tied in costs.tied) else "exact"
