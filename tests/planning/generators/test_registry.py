from __future__ import annotations

import pytest

from partita.errors import ScheduleError
from partita.planning import get_schedule, schedule_names


@pytest.mark.parametrize("name", schedule_names())
def test_a_schedule_is_found_in_capital_and_small_letters(name: str) -> None:
    assert get_schedule(name.lower()) is get_schedule(name.upper())
    assert get_schedule(name).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ScheduleError, match="there is no schedule '2F2B': choose one of ForwardOnly, GPipe, 1F1B, LoopedBFS"
    ):
        get_schedule("2F2B")


@pytest.mark.parametrize("name", schedule_names())
def test_the_traits_say_what_the_schedule_does(name: str) -> None:
    kind = get_schedule(name)
    schedule = kind(stages=4, microbatches=6, ranks=2)
    assert schedule.name == name
    assert schedule.stage_ranks == kind.placement(4, 2)
    assert schedule.has_backward == kind.trains
    assert any(part.kind in ("I", "W") for _, part in schedule.passes()) == kind.splits_backward
