"""A schedule with the messages that a pipeline sends, whether or not it was given some."""

from __future__ import annotations

from collections.abc import Iterable

from partita.errors import ScheduleError
from partita.planning import Schedule, lower, validate

__all__ = ["with_messages"]


def with_messages(plain: Schedule, edges: Iterable[tuple[int, int]]) -> Schedule:
    """With sends and receives for what crosses; those that it has are kept where they are right.

    Args:
        edges: from which stage to which values go.

    Raises:
        ScheduleError: actions that break a rule.
    """
    pairs = tuple(edges)
    if not plain.is_lowered:
        return lower(plain, pairs)
    try:
        validate(plain, pairs)
    except ScheduleError:
        rows = tuple(
            tuple(action for action in row if action is not None and not action.is_communication)
            for row in plain.rows
        )
        return lower(Schedule(plain.name, plain.stage_ranks, plain.microbatches, rows), pairs)
    return plain
