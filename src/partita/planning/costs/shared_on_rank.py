"""What stages of one rank hand to each other: it is in memory once, and no message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.spanning import NOTHING_SHARED, SharedOnRank

__all__ = ["shared_on_rank"]


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
        handed_gradients=((1, 20),))
    """
    ends = [(start, end - 1) for start, end in pairwise(cuts)]
    on_rank: dict[int, list[tuple[int, int]]] = {}
    for rank, own in zip(stage_ranks, ends, strict=True):
        on_rank.setdefault(rank, []).append(own)
    return [
        _shared(costs, *own, on_rank[rank])._replace(
            handed_gradients=_handed_gradients(costs, stage, cuts, stage_ranks)
        )
        if len(on_rank[rank]) > 1
        else NOTHING_SHARED
        for stage, (rank, own) in enumerate(zip(stage_ranks, ends, strict=True))
    ]


def _shared(costs: CostModel, first: int, last: int, on_rank: Sequence[tuple[int, int]]) -> SharedOnRank:
    entering = sent = received = 0
    if first:
        across = costs.across[first - 1]
        if any(there == first - 1 for _, there in on_rank):
            entering = costs.crossing_bytes[first - 1] - sum(it.sent_bytes(first - 1) for it in across)
            sent = costs.gradient_bytes[first - 1]
            sent -= sum(it.sent_gradient_bytes(first - 1) for it in across)
        for it in across:
            if it.is_used_in(first, last) and any(
                here < first and (here <= max(it.maker, 0) <= there or it.is_used_in(here, there))
                for here, there in on_rank
            ):
                entering += it.sent_bytes(first - 1)
                sent += it.sent_gradient_bytes(first - 1)
    if last + 1 < len(costs.units):
        across = costs.across[last]
        if any(here == last + 1 for here, _ in on_rank):
            received = costs.gradient_bytes[last] - sum(it.sent_gradient_bytes(last) for it in across)
        for it in across:
            later = [user for user in it.users if user > last]
            touched = it.maker >= first or it.is_used_in(first, last)
            if touched and all(any(here <= user <= there for here, there in on_rank) for user in later):
                received += it.sent_gradient_bytes(last)
    tied = sum(it.gradient_bytes for it in costs.tied if it.stays_on(on_rank, first, last))
    return SharedOnRank(max(entering, 0), max(sent, 0), max(received, 0), tied)


def _handed_gradients(
    costs: CostModel, stage: int, cuts: Sequence[int], stage_ranks: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The gradient of a value goes from each stage that has it to the one before that has it."""
    first, last = cuts[stage], cuts[stage + 1] - 1
    if not first:
        return ()
    sizes = {stage - 1: costs.direct_gradient_bytes[first - 1]}
    for value in costs.across[first - 1]:
        if value.gradient_bytes and value.is_used_in(first, last):
            before = max([value.maker, *(user for user in value.users if user < first)])
            to = bisect_right(cuts, before) - 1
            sizes[to] = sizes.get(to, 0) + value.sent_gradient_bytes(first - 1)
    here = stage_ranks[stage]
    return tuple((to, size) for to, size in sorted(sizes.items()) if size and stage_ranks[to] == here)
