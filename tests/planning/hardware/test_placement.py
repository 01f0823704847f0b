from __future__ import annotations

import pytest

from partita.errors import ScheduleError
from partita.planning import get_schedule, loop_placement, v_placement


def test_stages_go_round_the_ranks() -> None:
    assert loop_placement(5, 3) == (0, 1, 2, 0, 1)


def test_stages_go_down_and_back() -> None:
    assert v_placement(6, 3) == (0, 1, 2, 2, 1, 0)


def test_a_v_has_two_stages_a_rank() -> None:
    with pytest.raises(
        ScheduleError, match="5 stages on 3 ranks: a V needs two stages a rank, so give 6 stages"
    ):
        v_placement(5, 3)


def test_a_placement_names_one_rank_a_stage() -> None:
    with pytest.raises(ScheduleError, match="the placement names 2 ranks for 3 stages"):
        get_schedule("GPipe").generate(3, 1, placement=(0, 1))  # type: ignore[call-arg]


def test_a_placement_leaves_no_rank_out() -> None:
    with pytest.raises(ScheduleError, match="leaves a rank without a stage"):
        get_schedule("GPipe").generate(3, 1, placement=(0, 2, 2))  # type: ignore[call-arg]
