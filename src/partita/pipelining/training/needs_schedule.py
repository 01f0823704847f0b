"""What works on all stages of a pipeline takes the schedule that runs them."""

from __future__ import annotations

from partita.errors import ArgumentError
from partita.pipelining.steps.schedules import PipelineSchedule

__all__ = ["check_schedule"]


def check_schedule(value: object, name: str) -> None:
    """Check that ``value`` is a schedule.

    Args:
        name: of the function that takes it.

    Raises:
        ArgumentError: it is something else, such as parameters or a stage.
    """
    if not isinstance(value, PipelineSchedule):
        raise ArgumentError(
            f"{name} takes the schedule, got {type(value).__name__}: it works on the stages of all ranks, "
            "which the schedule knows"
        )
