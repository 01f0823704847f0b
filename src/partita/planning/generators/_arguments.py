"""The checks on what a generator is given."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import ScheduleError
from partita.planning.placement import check_placement, loop_placement

__all__ = ["check_counts", "chunks_per_rank", "place"]


def check_counts(name: str, stages: int, microbatches: int, ranks: int) -> None:
    """Raise ScheduleError unless each is a whole number from 1 and no rank is left without a stage."""
    for what, value in (("stages", stages), ("microbatches", microbatches), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name} with {what}={value!r}: give a whole number of at least 1")
    if stages < ranks:
        raise ScheduleError(
            f"{name} with {stages} stages on {ranks} ranks: give each rank a stage, or fewer ranks"
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


def chunks_per_rank(name: str, stages: int, microbatches: int, ranks: int | None) -> tuple[int, int]:
    """The number of ranks and of stages on each, where every rank must have as many."""
    ranks = stages if ranks is None else ranks
    check_counts(name, stages, microbatches, ranks)
    if stages % ranks:
        raise ScheduleError(
            f"{name} with {stages} stages on {ranks} ranks: it needs as many stages on each rank, "
            f"so give {stages - stages % ranks} or {stages - stages % ranks + ranks} stages, or take GPipe "
            "or 1F1B"
        )
    return ranks, stages // ranks
