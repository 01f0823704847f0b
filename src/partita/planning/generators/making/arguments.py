"""The checks on what a generator is given."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import ScheduleError
from partita.planning.hardware.placement import check_placement, loop_placement, v_placement

__all__ = ["check_counts", "check_step_size", "place", "place_in_v"]

_MOST_FORWARD_PASSES = 1_000_000
"""Each pass of a schedule takes about a kilobyte: many more take all of a machine's memory, and hours."""
_MOST_STAGES = 4096
"""Each waits for those before it: the ticks in which ranks idle are as many as the square of the stages."""


def check_counts(name: str, stages: int, microbatches: int, ranks: int) -> None:
    """Raise ScheduleError unless each is a whole number from 1 and no rank is left without a stage."""
    for what, value in (("stages", stages), ("microbatches", microbatches), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name} with {what}={value!r}: give a whole number of at least 1")
    check_step_size(name, stages, microbatches)
    if stages < ranks:
        raise ScheduleError(
            f"{name} with {stages} stages on {ranks} ranks: give each rank a stage, or fewer ranks"
        )


def check_step_size(name: str, stages: int, microbatches: int) -> None:
    """Raise ScheduleError where a step has more passes or stages than a machine has memory for."""
    if stages > _MOST_STAGES:
        raise ScheduleError(
            f"{name} has {stages} stages, more than the {_MOST_STAGES} that can be planned: give fewer"
        )
    if stages * microbatches > _MOST_FORWARD_PASSES:
        raise ScheduleError(
            f"{name} with {stages} stages and {microbatches} microbatches has {stages * microbatches} "
            f"forward passes, more than the {_MOST_FORWARD_PASSES} that can be planned: give fewer of them"
        )


def place(
    name: str, stages: int, microbatches: int, ranks: int | None, placement: Sequence[int] | None
) -> tuple[int, ...]:
    """The rank of each stage: `placement` where given, otherwise round `ranks` (one a stage by default)."""
    if placement is None:
        ranks = stages if ranks is None else ranks
        check_counts(name, stages, microbatches, ranks)
        return loop_placement(stages, ranks)
    check_counts(name, stages, microbatches, 1)
    placed = check_placement(stages, placement)
    if ranks is not None and ranks != max(placed) + 1:
        raise ScheduleError(
            f"{name} with ranks={ranks} and a placement on {max(placed) + 1} ranks: give one of the two"
        )
    return placed


def place_in_v(
    name: str, stages: int, microbatches: int, ranks: int | None, placement: Sequence[int] | None
) -> tuple[int, ...]:
    """The V of stages; ScheduleError, with the way out in it, where `placement` is another."""
    if placement is not None:
        check_counts(name, stages, microbatches, 1)
        chosen = check_placement(stages, placement)
        if ranks is not None and ranks != max(chosen) + 1:
            raise ScheduleError(
                f"{name} with ranks={ranks} and a placement on {max(chosen) + 1} ranks: give one of the two"
            )
        ranks = max(chosen) + 1
        if stages != 2 * ranks or chosen != v_placement(stages, ranks):
            raise ScheduleError(
                f"{name} with the placement {chosen}: it needs two stages a rank, placed in a V, so cut "
                f"the model into {2 * ranks} stages and build stages r and {2 * ranks - 1} - r on rank r, or "
                "take InterleavedZeroBubble, which runs any placement"
            )
        return chosen
    ranks = stages // 2 if ranks is None else ranks
    check_counts(name, stages, microbatches, ranks)
    return v_placement(stages, ranks)
