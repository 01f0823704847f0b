"""What a rank holds at most while it runs its passes in order, for one choice of costs after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from partita.planning.costs.stage_cost import StageCost
from partita.planning.schedules.actions import PASS_KINDS
from partita.planning.searching.orders.clock import Pass, has_backward

__all__ = ["RowKinds", "peak_of", "row_kinds"]

_KINDS = len(PASS_KINDS)


class RowKinds(NamedTuple):
    """What matters of a row's passes, whatever they cost.

    Attributes:
        stages: of the row, in order.
        kinds: of each pass the place of its stage in `stages`, times the number of kinds, and its kind's.
        trains: whether anything is kept for a backward pass.
    """

    stages: list[int]
    kinds: list[int]
    trains: bool


def row_kinds(row: Sequence[Pass]) -> RowKinds:
    """What `peak_of` takes of a row."""
    stages = sorted({stage for _, stage, _ in row})
    first = {stage: _KINDS * place for place, stage in enumerate(stages)}
    return RowKinds(stages, [first[stage] + kind for kind, stage, _ in row], has_backward(row))


def peak_of(row: RowKinds, costs: Mapping[int, StageCost], beside: Sequence[int]) -> int:
    """The most bytes that the row's rank holds.

    Args:
        row: from `row_kinds`.
        costs: of each of the rank's stages.
        beside: what lies there for messages and between stages, beside each pass.
    """
    always = sum(cost.static_bytes for cost in costs.values())
    own = [costs[stage] for stage in row.stages]
    during = [size for cost in own for size in cost.bytes_during_each]
    after = [cost.bytes_after(kind) for cost in own for kind in PASS_KINDS]
    if not row.trains:
        after = [0] * len(after)
    # Where memory is checked for each of very many orders, a loop over the passes takes five times as long.
    before = accumulate(map(after.__getitem__, row.kinds), initial=always)
    with_pass = map(add, before, map(during.__getitem__, row.kinds))
    return max(map(add, with_pass, beside), default=always)
