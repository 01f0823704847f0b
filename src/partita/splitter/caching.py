"""Keeping each autocast region's cache of converted weights to itself, when the pieces run.

Regions that several parts share are held open around them (see `SharedCache`), and the cache is emptied where
one region gives way to another. A region that is interrupted by another loses its entries; where it needs
them again, the two are kept apart by ordering edges::

    part 0   A: mm(x, w)              B: mm(z, v)      the second use of w would convert it again,
    part 1   A: mm(y, w)                               so all of A has to come before all of B
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch.fx import Node

from partita.graph.casts import Casts
from partita.graph.order import OrderEdge
from partita.splitter.ordering import Parts

__all__ = ["cache_borders", "order_with_casts"]


def order_with_casts(
    order: Callable[[list[OrderEdge]], Parts], casts: Casts | None, piece_of: Sequence[int], *, repair: bool
) -> Parts:
    """Order the parts so that no autocast region loses a converted weight that it uses again.

    Args:
        order: from additional ordering edges to parts; it may raise.
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
    """Positions before which the cache has to be emptied: there, one outermost autocast region gives way to
    another.
    """
    if casts is None:
        return frozenset()
    epochs = _epochs(casts, part_of)
    return frozenset(positions[0] for positions in epochs[1:])


def _epochs(casts: Casts, part_of: Sequence[int]) -> list[list[int]]:
    """The nodes under autocast as they run, divided where the region changes."""
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
    """Pairs of regions, in the order of the graph, of which one interrupts the other between two uses of a
    weight.
    """
    epochs = _epochs(casts, part_of)
    epoch_of = {position: number for number, positions in enumerate(epochs) for position in positions}
    first = {
        region: position
        for position, region in reversed(list(enumerate(casts.regions)))
        if region is not None
    }
    found: set[tuple[Node, Node]] = set()
    for users in casts.shared:
        numbers = [epoch_of[position] for position in users if position in epoch_of]
        if not numbers or min(numbers) == max(numbers):
            continue
        region = casts.regions[users[0]]
        for number in range(min(numbers), max(numbers)):
            other = casts.regions[epochs[number][0]]
            if region is not None and other is not None and other is not region:
                found.add((region, other) if first[region] < first[other] else (other, region))
    return found


def _separation(
    casts: Casts, piece_of: Sequence[int], earlier: Node, later: Node, *, repair: bool
) -> list[OrderEdge]:
    """All of one region before all of another. Between pieces one edge a pair is enough; dividing pieces
    needs every node.
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
