"""Which stage hands what to which, and what of it stays on a rank: that is in memory once, and no message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.spanning import NOTHING_SHARED, SharedOnRank

__all__ = ["handed_bytes", "shared_on_rank"]

_Sizes = dict[tuple[int, int], int]


def shared_on_rank(costs: CostModel, cuts: Sequence[int], stage_ranks: Sequence[int]) -> list[SharedOnRank]:
    """For each stage, what it and other stages of its rank hand over, which is there once and no message.

    Args:
        costs: of the units.
        cuts: the first unit of each stage, and how many units there are.
        stage_ranks: the rank of each stage.

    >>> from partita.planning import Unit
    >>> costs = CostModel(tuple(Unit(name, 1.0, 2.0) for name in "abc"), (10, 20))
    >>> shared_on_rank(costs, (0, 1, 2, 3), (0, 1, 1))[2]
    SharedOnRank(entering_bytes=20, sent_gradient_bytes=20, received_gradient_bytes=0, sent_tied_bytes=0,
        handed_gradients=((1, 20),), sent_values=None)
    """
    ends = [(start, end - 1) for start, end in pairwise(cuts)]
    on_rank: dict[int, list[tuple[int, int]]] = {}
    for rank, own in zip(stage_ranks, ends, strict=True):
        on_rank.setdefault(rank, []).append(own)
    if len(on_rank) == len(ends) and not costs.spanning:
        return [NOTHING_SHARED] * len(ends)
    values, gradients = handed_bytes(costs, cuts)
    entering, sent, received = ([0] * len(ends) for _ in range(3))
    for (stage, to), size in values.items():
        entering[to] += size if stage_ranks[stage] == stage_ranks[to] else 0
    handed: list[list[tuple[int, int]]] = [[] for _ in ends]
    goes_to: list[list[tuple[int, int]]] = [[] for _ in ends]
    for (stage, to), size in sorted(gradients.items()):
        stays = stage_ranks[stage] == stage_ranks[to]
        sent[stage] += size if stays else 0
        received[to] += size if stays else 0
        if stays or costs.spanning:
            handed[stage].append((to, size))
    for (stage, to), size in sorted(values.items()):
        goes_to[stage].append((to, size))
    return [
        SharedOnRank(
            entering[stage],
            sent[stage],
            received[stage],
            sum(it.gradient_bytes for it in costs.tied if it.stays_on(on_rank[rank], *ends[stage])),
            tuple(handed[stage]),
            tuple(goes_to[stage]) if costs.spanning else None,
        )
        for stage, rank in enumerate(stage_ranks)
    ]


def handed_bytes(costs: CostModel, cuts: Sequence[int]) -> tuple[_Sizes, _Sizes]:
    """The bytes of values by (stage that makes them, stage that uses them), and of gradients by (stage that
    hands them on, earlier stage that is handed them), for one microbatch.

    A value goes straight from its maker to each stage that uses it; its gradient goes from each of these
    stages to the one before that has it.

    >>> from partita.planning import Unit
    >>> from partita.planning.costs.spanning import SpanningValue
    >>> past = (SpanningValue(4, 4, 0, (1, 2)),)
    >>> costs = CostModel(tuple(Unit(name, 1.0, 2.0) for name in "abc"), (4, 10), spanning=past)
    >>> handed_bytes(costs, (0, 1, 2, 3))
    ({(0, 1): 4, (1, 2): 6, (0, 2): 4}, {(1, 0): 4, (2, 1): 10})
    """
    values: _Sizes = {}
    gradients: _Sizes = {}

    def add(sizes: _Sizes, stage: int, to: int, size: int) -> None:
        if size:
            sizes[stage, to] = sizes.get((stage, to), 0) + size

    for stage, (first, end) in enumerate(pairwise(cuts)):
        if not stage:
            continue
        border = first - 1
        add(values, stage - 1, stage, costs.direct_bytes[border])
        add(gradients, stage, stage - 1, costs.direct_gradient_bytes[border])
        for value in costs.across[border]:
            if not value.is_used_in(first, end - 1):
                continue
            for view in value.parts:
                if view.crosses(border):
                    maker = bisect_right(cuts, max(view.maker, 0)) - 1
                    before = bisect_right(cuts, max(value.holder_before(first, view), 0)) - 1
                    add(values, maker, stage, view.bytes)
                    add(gradients, stage, before, view.gradient_bytes)
    return values, gradients
