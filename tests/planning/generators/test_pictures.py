"""The picture in the docstring of a schedule's file is what the schedule looks like."""

from __future__ import annotations

import sys

import pytest

from partita.planning import Action, Schedule, get_schedule

RANKS = 4


def picture(schedule: Schedule) -> str:
    """One line a rank, one cell a tick: kind and microbatch; small letters for a rank's second stage."""
    return "\n".join(
        f"    {rank}   " + " ".join(f"{_cell(action, schedule.ranks):2}" for action in row).rstrip()
        for rank, row in enumerate(schedule.rows)
    )


def _cell(action: Action | None, ranks: int) -> str:
    if action is None:
        return " ."
    text = f"{action.kind}{action.microbatch}"
    return text if action.stage < ranks else text.lower()


@pytest.mark.parametrize(
    ("name", "file", "microbatches"),
    [
        ("ZBH1", "zb_h1", 6),
        ("ZBH2", "zb_h2", 8),
        ("ZB2p", "zb_2p", 8),
        ("VHalf", "v_shaped.v_half", 4),
        ("VMin", "v_shaped.v_min", 3),
    ],
)
def test_the_picture_is_what_the_code_makes(name: str, file: str, microbatches: int) -> None:
    kind = get_schedule(name)
    schedule = kind(RANKS * (2 if kind.shape == "V" else 1), microbatches, RANKS)
    documented = sys.modules[f"partita.planning.generators.{file}"].__doc__ or ""
    assert f"{RANKS} ranks and {microbatches} microbatches" in documented
    assert picture(schedule) in documented
