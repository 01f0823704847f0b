"""Nodes of several colours in rounds of one colour each, as few as the order of the nodes allows.

Each round takes every node of its colour that is ready, and those that get ready thereby, before it gives
way. The colours are: not captured, and each device that has captured nodes::

    graph     a1   u1   b1   u2   a2          (a, b on the device; u not; no edge but u1 -> a2)
    rounds    u1 u2 | a1 b1 a2

Two rounds of one colour can't be one where there are two colours: a node of the later one was not ready
before, so it needs one of the round between them, which in turn needs one of the earlier. Taking nodes in
rounds costs a heap each: O(n log n + edges).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

__all__ = ["in_rounds"]


def in_rounds(
    colours: Sequence[Hashable | None], edges: Sequence[Sequence[int]], *, first: Hashable, neutral: Hashable
) -> list[int]:
    """Return the round of each node.

    Args:
        colours: of each node; None: it takes part in nothing.
        edges: for each node, those that must not run before it (a later round is fine, the same one too).
        first: the colour to begin with, where it has a ready node.
        neutral: nodes of this colour run in any round: with what they need, or, where they need nothing, with
            their first user.

    Returns:
        The number of the round from 0, or -1 for a node without a colour. An edge never leads to an earlier
        round.
    """
    # 1. Count what each node waits for. A node is ready when that is 0.
    round_of = [-1] * len(colours)
    waiting = [0] * len(colours)
    for after in edges:
        for node in after:
            waiting[node] += 1
    ready: dict[Hashable, list[int]] = {}
    free: list[int] = []

    def release(node: int) -> None:
        for after in edges[node]:
            waiting[after] -= 1
            if not waiting[after] and colours[after] is not None:
                heapq.heappush(ready.setdefault(colours[after], []), after)

    # 2. Put the nodes that wait for nothing into their colours' queues; neutral ones among them come last.
    for node, colour in enumerate(colours):
        if colour is not None and not waiting[node] and colour != neutral:
            heapq.heappush(ready.setdefault(colour, []), node)
    pending = [node for node, colour in enumerate(colours) if colour == neutral and not waiting[node]]
    while pending:
        free.extend(pending)
        for node in pending:
            release(node)
        pending = ready.pop(neutral, [])

    # 3. A round takes all ready nodes of one colour, and those that get ready thereby; then the next colour.
    number, colour = 0, first if ready.get(first) else _next(ready, None)
    while colour is not None:
        queue = ready.pop(colour, [])
        while queue:
            node = heapq.heappop(queue)
            round_of[node] = number
            release(node)
            for more in (ready.pop(colour, ()), ready.pop(neutral, ())):
                for item in more:
                    heapq.heappush(queue, item)
        number, colour = number + 1, _next(ready, colour)

    # 4. A neutral node that waited for nothing runs with its first user.
    for node in sorted(free, reverse=True):
        round_of[node] = min((round_of[after] for after in edges[node] if round_of[after] >= 0), default=0)
    return round_of


def _next(ready: dict[Hashable, list[int]], current: Hashable | None) -> Hashable | None:
    """The colour of the earliest ready node."""
    candidates = [(queue[0], colour) for colour, queue in ready.items() if queue and colour != current]
    return min(candidates, key=lambda item: item[0])[1] if candidates else None
