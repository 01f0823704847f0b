"""Completion of the names of schedules."""

from __future__ import annotations

from partita.planning import get_schedule, schedule_names

__all__ = ["complete_schedule"]


def complete_schedule(incomplete: str) -> list[str]:
    """Return the schedules that train and begin so, whatever their case."""
    kinds = (get_schedule(name) for name in schedule_names())
    return [kind.name for kind in kinds if kind.trains and kind.name.lower().startswith(incomplete.lower())]
