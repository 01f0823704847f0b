from __future__ import annotations

import json

import pytest

from partita.errors import PlanError, ScheduleError
from partita.planning import Action, Schedule, get_schedule, lower, schedule_names

NAMES = schedule_names()


def made(name: str) -> Schedule:
    return get_schedule(name)(stages=4, microbatches=6, ranks=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [lambda schedule: schedule, lower], ids=["compute", "lowered"])
def test_csv_and_json_give_the_schedule_back(name: str, change) -> None:  # type: ignore[no-untyped-def]
    schedule = change(made(name))
    assert Schedule.from_csv(schedule.to_csv(), name=name) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("name", NAMES)
def test_compute_only_undoes_lowering(name: str) -> None:
    assert lower(made(name)).compute_only() == made(name).without_idle()


def test_an_empty_cell_is_an_idle_tick() -> None:
    schedule = Schedule.from_csv("0F0,,0B0\r\n,1F0,1B0\r\n")
    assert schedule.rows[0][1] is None
    assert schedule.actions(1) == (Action.parse("1F0"), Action.parse("1B0"))


def test_a_rank_without_actions_keeps_its_line() -> None:
    schedule = Schedule("x", (0,), 1, ((Action.parse("0F0"),), ()))
    assert Schedule.from_csv(schedule.to_csv()).ranks == 2


def test_in_flight_counts_what_waits_for_its_backward_pass() -> None:
    assert get_schedule("1F1B")(4, 8).in_flight() == (4, 3, 2, 1)
    assert get_schedule("GPipe")(2, 8).in_flight() == (8, 8)
    assert get_schedule("ForwardOnly")(2, 8).in_flight() == (0, 0)


def test_a_bad_cell_is_named_by_rank_and_position() -> None:
    with pytest.raises(ScheduleError, match="rank 1, position 2: 'what' is not an action"):
        Schedule.from_csv("0F0\n1F0,,what\n")


def test_a_stage_in_two_lines_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"stage 0 is on rank 0 and on rank 1 \(0B0\): keep all of its actions on one"
    ):
        Schedule.from_csv("0F0\n0B0\n")


def test_a_stage_in_no_line_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="stage 1 has no action, and stage 2 is the last: number the stages from 0"
    ):
        Schedule.from_csv("0F0,2F0\n")


def test_a_stage_on_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 1 is on rank 5, but there are 1 rows"):
        Schedule("x", (0, 5), 1, ((),))


def test_no_microbatches_are_refused() -> None:
    with pytest.raises(PlanError, match="microbatches is 0"):
        Schedule("x", (0,), 0, ((),))


def test_a_bad_action_in_json_is_named_by_rank_and_position() -> None:
    data = json.loads(made("GPipe").to_json())
    data["rows"][1][3] = "oops"
    with pytest.raises(ScheduleError, match="rank 1, position 3: 'oops' is not an action"):
        Schedule.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0," + "x" * 200_000, r"this is not CSV \(field larger than field limit \(131072\)\)"),
        ("0F0,1F" + "9" * 5000, r"rank 0, position 1: '1F9+ has a number of more than 9 digits"),
        ("99999999999F0", "rank 0, position 0: '99999999999F0' has a number of more than 9 digits"),
        ("0F0,999999999F0", "stage 1 has no action"),
    ],
)
def test_text_that_is_too_large_is_an_error_of_partitas(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n,"])
def test_a_csv_without_actions_says_so(text: str) -> None:
    with pytest.raises(ScheduleError, match="this CSV has no actions: give one line a rank"):
        Schedule.from_csv(text)
