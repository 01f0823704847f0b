"""A schedule with the messages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable

from partita.errors import ScheduleError
from partita.planning import Schedule, lower, validate

__all__ = ["with_messages"]


def with_messages(schedule: Schedule, edges: Iterable[tuple[int, int]]) -> Schedule:
    """Add sends and receives. Those that it has already are kept if they are right for these edges.

    Args:
        edges: the pairs of stages that values go between.

    Raises:
        ScheduleError: actions that break a rule.
    """
    pairs = tuple(edges)
    if not schedule.is_lowered:
        return lower(schedule, pairs)
    try:
        validate(schedule, pairs)
    except ScheduleError:
        rows = tuple(
            tuple(action for action in row if action is not None and not action.is_communication)
            for row in schedule.rows
        )
        return lower(Schedule(schedule.name, schedule.stage_ranks, schedule.microbatches, rows), pairs)
    return schedule
