"""An order of the pieces that keeps what can be observed, or a proof that there is none.

Terms:
    dependence: a pair of nodes that must run in this order, because a value flows or for an ordering edge.
    crossing: a dependence between nodes of different pieces.
    group: pieces that need each other in cycles (a strongly connected component); most have one piece only.
    conflict: a group of several pieces. It has no order, unless some of its pieces are divided.
    level: of a node in a conflict, how often the longest chain of dependences to it goes backwards in the
        order in which the pieces first appear.
    part: the nodes of one piece and one level. By level, then piece, every dependence goes forward::

        neg(x): 0        pieces 0 and 1 need each other        part 0    neg     level 0
        add_(x): 1       --------------------------->          part 1    add_    level 0
        abs(x): 0                                              part 0'   abs     level 1

Of the legal orders the one nearest to the original is taken: a group comes as early as the position of its
first node allows.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from partita.errors import OrderConflict
from partita.splitter.result import Conflict

__all__ = ["Dependence", "Parts", "order_pieces"]


@dataclass(frozen=True, slots=True)
class Dependence:
    """Node ``before`` must run before node ``after`` (positions), for the reason ``why``."""

    before: int
    after: int
    why: str


@dataclass(frozen=True)
class Parts:
    """The pieces, some perhaps divided, in the order in which they run.

    Attributes:
        part_of: for each position the index of its part, -1 for none.
        origin: for each part, the index of its piece.
        number: for each part, its number among the parts of its piece, from 0.
        conflicts: the groups that were repaired.
    """

    part_of: list[int]
    origin: list[int]
    number: list[int]
    conflicts: tuple[Conflict, ...] = ()


def order_pieces(
    nodes: Sequence[Node],
    piece_of: list[int],
    names: Sequence[str],
    crossings: Sequence[Dependence],
    inner: Iterable[tuple[int, int]],
    *,
    repair: bool,
) -> Parts:
    """Order the pieces, dividing some where that is needed and allowed.

    Args:
        piece_of: piece of each position, numbered by first appearance; -1 for none.
        names: of the pieces, for messages.
        crossings: dependences between nodes of different pieces.
        inner: dependences within a piece, as pairs (before, after), sorted by ``after``; read only where a
            piece is divided.

    Raises:
        OrderConflict: there is a cycle and ``repair`` is off.
    """
    # Most often the pieces can run in the order in which they first appear.
    count = len(names)
    pairs = {(piece_of[edge.before], piece_of[edge.after]) for edge in crossings}
    if all(before < after for before, after in pairs):
        return Parts(piece_of, list(range(count)), [0] * count)
    # Else: the groups of pieces that need each other.
    following: list[list[int]] = [[] for _ in range(count)]
    for before, after in pairs:
        following[before].append(after)
    groups = _components(following)
    group_of = [0] * count
    for index, group in enumerate(groups):
        for piece in group:
            group_of[piece] = index
    # Several in one group are a conflict: refused, or repaired below.
    conflicts = tuple(
        _conflict(nodes, piece_of, names, crossings, sorted(group)) for group in groups if len(group) > 1
    )
    if conflicts and not repair:
        raise OrderConflict(_message(conflicts), conflicts[0].chain)
    # Order the groups; within a conflict, order by levels.
    rank = _nearest_order(groups, group_of, pairs)
    levels = _levels(piece_of, group_of, crossings, inner) if conflicts else {}
    return _number_parts(piece_of, names, group_of, rank, levels, conflicts)


def _components(following: list[list[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan 1972, without recursion).

    ``order`` is when a piece was first visited, ``low`` the earliest piece on the stack that it leads to. A
    piece whose ``low`` is its own ``order`` is the root of a component: all that lies above it on the stack.
    """
    count = len(following)
    order, low = [-1] * count, [0] * count
    on_stack, stack, groups = [False] * count, list[int](), list[list[int]]()
    clock = 0
    for root in range(count):
        if order[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            piece, step = work.pop()
            # On the first visit the piece goes onto the stack.
            if step == 0:
                order[piece] = low[piece] = clock
                clock += 1
                stack.append(piece)
                on_stack[piece] = True
            # Visit its successors one by one; it is resumed behind each of them.
            descended = False
            for position in range(step, len(following[piece])):
                after = following[piece][position]
                if order[after] < 0:
                    work += [(piece, position + 1), (after, 0)]
                    descended = True
                    break
                if on_stack[after]:
                    low[piece] = min(low[piece], order[after])
            if descended:
                continue
            # All successors are done: close the component, and tell the predecessor.
            if low[piece] == order[piece]:
                group = []
                while True:
                    member = stack.pop()
                    on_stack[member] = False
                    group.append(member)
                    if member == piece:
                        break
                groups.append(group)
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[piece])
    return groups


def _nearest_order(groups: list[list[int]], group_of: list[int], pairs: set[tuple[int, int]]) -> list[int]:
    """The place of each group: a topological order that prefers the group whose first piece appears first."""
    # Dependences between groups, and for each group how many predecessors are not placed yet.
    links = {(group_of[before], group_of[after]) for before, after in pairs}
    following: list[list[int]] = [[] for _ in groups]
    waiting = [0] * len(groups)
    for before, after in links:
        if before != after:
            following[before].append(after)
            waiting[after] += 1
    # Of all groups without such predecessors, place the one that appears first.
    ready = [(min(group), index) for index, group in enumerate(groups) if not waiting[index]]
    heapq.heapify(ready)
    rank = [0] * len(groups)
    places = itertools.count()
    while ready:
        _, index = heapq.heappop(ready)
        rank[index] = next(places)
        for after in following[index]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (min(groups[after]), after))
    return rank


def _levels(
    piece_of: list[int],
    group_of: list[int],
    crossings: Sequence[Dependence],
    inner: Iterable[tuple[int, int]],
) -> dict[int, int]:
    """The level of each node whose level is not 0."""
    # What each node follows within its group, and whether that goes backwards in order of appearance.
    incoming: dict[int, list[tuple[int, int]]] = {}
    for edge in crossings:
        before, after = piece_of[edge.before], piece_of[edge.after]
        if group_of[before] == group_of[after]:
            incoming.setdefault(edge.after, []).append((edge.before, 1 if before > after else 0))
    for source, target in inner:
        incoming.setdefault(target, []).append((source, 0))
    # In graph order the levels of what a node follows are known.
    levels: dict[int, int] = {}
    for position in sorted(incoming):
        level = max(levels.get(before, 0) + step for before, step in incoming[position])
        if level:
            levels[position] = level
    return levels


def _number_parts(
    piece_of: list[int],
    names: Sequence[str],
    group_of: list[int],
    rank: list[int],
    levels: dict[int, int],
    conflicts: tuple[Conflict, ...],
) -> Parts:
    """Number the parts in the order in which they run: by group, level and piece."""
    keys = [
        (rank[group_of[piece]], levels.get(position, 0), piece) if piece >= 0 else None
        for position, piece in enumerate(piece_of)
    ]
    ordered = sorted({key for key in keys if key is not None})
    index = {key: part for part, key in enumerate(ordered)}
    part_of = [index[key] if key is not None else -1 for key in keys]
    # Number the parts of each piece, and report those that were divided.
    counts: Counter[int] = Counter()
    origin, number = [], []
    for _, _, piece in ordered:
        origin.append(piece)
        number.append(counts[piece])
        counts[piece] += 1
    divided = {names[piece]: count for piece, count in counts.items() if count > 1}
    repaired = tuple(
        replace(conflict, repaired_into={name: divided[name] for name in divided if name in conflict.pieces})
        for conflict in conflicts
    )
    return Parts(part_of, origin, number, repaired)


def _conflict(
    nodes: Sequence[Node],
    piece_of: list[int],
    names: Sequence[str],
    crossings: Sequence[Dependence],
    group: list[int],
) -> Conflict:
    """A shortest cycle through the first piece of a group, as a chain of nodes."""
    # For each piece of the group, one dependence to each piece that follows it.
    members = set(group)
    step: dict[int, dict[int, Dependence]] = {piece: {} for piece in group}
    for edge in crossings:
        before, after = piece_of[edge.before], piece_of[edge.after]
        if before in members and after in members:
            step[before].setdefault(after, edge)
    # Breadth-first search from the first piece back to itself.
    start = group[0]
    came_from: dict[int, int] = {}
    queue = [start]
    for piece in queue:
        if start in step[piece]:
            break
        for after in step[piece]:
            if after != start and after not in came_from:
                came_from[after] = piece
                queue.append(after)
    path = [piece]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    path.reverse()
    # The dependences along the way, in words.
    edges = [step[before][after] for before, after in zip(path, [*path[1:], start], strict=True)]
    lines = [
        f"  {nodes[edge.before].name!r} in {names[piece_of[edge.before]]} must run before "
        f"{nodes[edge.after].name!r} in {names[piece_of[edge.after]]}: {edge.why}"
        for edge in edges
    ]
    chain = tuple(nodes[position].name for edge in edges for position in (edge.before, edge.after))
    return Conflict(tuple(names[piece] for piece in path), chain, "\n".join(lines))


def _message(conflicts: tuple[Conflict, ...]) -> str:
    body = "\n".join(conflict.explanation for conflict in conflicts)
    return (
        f"no order of the pieces keeps what can be observed; these form a cycle:\n{body}\n"
        'Put the nodes named here into one piece, or pass on_conflict="repair" to have a piece divided.'
    )
