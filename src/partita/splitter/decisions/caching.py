"""Keeping the cached weights of an autocast region across pieces.

Terms:
    cache: within an outermost autocast region, torch converts each weight once (see `graph.casts`).
    epoch: a run of nodes, in the order in which the parts run, that stand in one outermost region. Between
        two epochs the cache is emptied. A region that several parts share stays open around them (see
        `SharedCache`).
    torn: a region is torn by another one that runs between two of its uses of one weight, which would be
        converted again. Ordering edges keep the two regions apart::

            part 0   A: mm(x, w)      B: mm(z, v)
            part 1   A: mm(y, w)                        all of A must run before all of B
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch.fx import Node

from partita.graph.casts import Casts
from partita.graph.order import OrderEdge
from partita.splitter.decisions.ordering import Parts

__all__ = ["cache_borders", "order_with_casts"]


def order_with_casts(
    order: Callable[[list[OrderEdge]], Parts], casts: Casts | None, piece_of: Sequence[int], *, repair: bool
) -> Parts:
    """Order the parts so that no region is torn: as long as one is, order again with more edges.

    Args:
        order: returns the parts for these additional ordering edges; it may raise.
        casts: None where the graph has no regions.
        piece_of: piece of each position, -1 for none.
    """
    if casts is None:
        return order([])
    extra: list[OrderEdge] = []
    apart: set[tuple[Node, Node]] = set()
    while True:
        parts = order(extra)
        torn = _torn(casts, parts.part_of) - apart
        if not torn:
            return parts
        apart |= torn
        for earlier, later in torn:
            extra += _separation(casts, piece_of, earlier, later, repair=repair)


def cache_borders(casts: Casts | None, part_of: Sequence[int]) -> frozenset[int]:
    """Return the positions before which the cache is emptied: the first of every epoch but one."""
    if casts is None:
        return frozenset()
    epochs = _epochs(casts, part_of)
    return frozenset(positions[0] for positions in epochs[1:])


def _epochs(casts: Casts, part_of: Sequence[int]) -> list[list[int]]:
    order = sorted(
        (
            position
            for position, region in enumerate(casts.regions)
            if region is not None and part_of[position] >= 0
        ),
        key=lambda position: (part_of[position], position),
    )
    epochs: list[list[int]] = []
    for position in order:
        if not epochs or casts.regions[epochs[-1][0]] is not casts.regions[position]:
            epochs.append([])
        epochs[-1].append(position)
    return epochs


def _torn(casts: Casts, part_of: Sequence[int]) -> set[tuple[Node, Node]]:
    """Pairs of regions, in the order of the graph, of which one tears the other."""
    epochs = _epochs(casts, part_of)
    epoch_of = {position: number for number, positions in enumerate(epochs) for position in positions}
    first = {
        region: position
        for position, region in reversed(list(enumerate(casts.regions)))
        if region is not None
    }
    torn: set[tuple[Node, Node]] = set()
    for users in casts.shared:
        numbers = [epoch_of[position] for position in users if position in epoch_of]
        if not numbers or min(numbers) == max(numbers):
            continue
        region = casts.regions[users[0]]
        for number in range(min(numbers), max(numbers)):
            other = casts.regions[epochs[number][0]]
            if region is not None and other is not None and other is not region:
                torn.add((region, other) if first[region] < first[other] else (other, region))
    return torn


def _separation(
    casts: Casts, piece_of: Sequence[int], earlier: Node, later: Node, *, repair: bool
) -> list[OrderEdge]:
    """Edges that put all of one region before all of another.

    One edge for each pair of pieces is enough; where pieces are divided, every node needs one.
    """
    sides = [
        [
            position
            for position, region in enumerate(casts.regions)
            if region is side and piece_of[position] >= 0
        ]
        for side in (earlier, later)
    ]
    if repair:
        line = [*sides[0], *sides[1]]
        return [OrderEdge(before, after, "autocast") for before, after in itertools.pairwise(line)]
    last = {piece_of[position]: position for position in sides[0]}
    first = {piece_of[position]: position for position in reversed(sides[1])}
    return [OrderEdge(before, after, "autocast") for before in last.values() for after in first.values()]
