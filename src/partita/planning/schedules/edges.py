"""Which stage feeds which: the edges that a schedule's dependencies follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partita.errors import ScheduleError

__all__ = ["EdgeTable", "edge_table"]


@dataclass(frozen=True)
class EdgeTable:
    """The edges of a pipeline, from either end.

    Attributes:
        producers: for each stage, the earlier stages whose output it takes, in order.
        consumers: for each stage, the later stages that take its output, in order.
    """

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]


def edge_table(stages: int, edges: Iterable[tuple[int, int]] | None = None) -> EdgeTable:
    """The table of `edges`, pairs (producer stage, consumer stage); without them, each stage feeds the next.

    Raises:
        ScheduleError: an edge from or to a stage that does not exist, or not to a later stage.

    >>> edge_table(3, [(0, 1), (1, 2), (0, 2)]).producers
    ((), (0,), (0, 1))
    """
    pairs = {(stage, stage + 1) for stage in range(stages - 1)} if edges is None else set(edges)
    producers: list[list[int]] = [[] for _ in range(stages)]
    consumers: list[list[int]] = [[] for _ in range(stages)]
    for producer, consumer in sorted(pairs):
        if not 0 <= producer < consumer < stages:
            raise ScheduleError(
                f"the edge from stage {producer} to stage {consumer} can't be: "
                f"an edge goes to a later stage, and stages are 0 to {stages - 1}"
            )
        producers[consumer].append(producer)
        consumers[producer].append(consumer)
    return EdgeTable(tuple(map(tuple, producers)), tuple(map(tuple, consumers)))
