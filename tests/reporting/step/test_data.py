from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import LossPoint, RunReport, StageRow, Timeline, TimelineSpan

losses = st.floats(allow_nan=True, allow_infinity=True)


def span(rank: int, start: float, end: float, kind: str = "F") -> TimelineSpan:
    return TimelineSpan(rank, f"{rank}{kind}0", kind, rank, 0, start, end)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_stage_refuses_a_time_that_is_no_duration(bad: float) -> None:
    with pytest.raises(ValueError, match=r"StageRow\.forward_s is .*; give a finite number"):
        StageRow(0, 0, (), 1, 4, bad, 0.0, 0)


def test_a_span_refuses_to_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"'0F0' ends at 1\.0 s, before it starts \(2\.0 s\); measure both"):
        span(0, 2.0, 1.0)


@pytest.mark.parametrize("bad", [-0.01, 1.01, math.nan])
def test_a_bubble_is_a_share(bad: float) -> None:
    with pytest.raises(ValueError, match=r"Timeline\.bubble is .*; give a share of time"):
        Timeline("t", (), 1.0, bad)


def test_a_timeline_refuses_an_infinite_makespan() -> None:
    with pytest.raises(ValueError, match=r"Timeline\.makespan_s is inf"):
        Timeline("t", (), math.inf, 0.0)


def test_a_step_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"LossPoint\.step is -1"):
        LossPoint(-1, 1.0, 1.0)


@given(losses)
def test_a_loss_never_differs_from_itself(loss: float) -> None:
    assert LossPoint(0, loss, loss).difference == 0.0


@given(losses, losses)
def test_a_difference_of_zero_means_the_same_value(one: float, other: float) -> None:
    point = LossPoint(0, one, other)
    same = one == other or (math.isnan(one) and math.isnan(other))
    assert (point.difference == 0.0) == same


def test_a_bubble_from_spans_counts_waiting_and_communication() -> None:
    spans = [span(0, 0, 1), span(0, 1, 4, "comm"), span(1, 0, 1, "idle"), span(1, 1, 4)]
    timeline = Timeline.from_spans("t", spans)
    assert timeline.makespan_s == 4
    assert timeline.bubble == pytest.approx(0.5)
    assert timeline.ranks == (0, 1)


def test_a_timeline_without_spans_has_no_bubble() -> None:
    timeline = Timeline.from_spans("t", [])
    assert (timeline.makespan_s, timeline.bubble, timeline.ranks, timeline.end_s) == (0.0, 0.0, (), 0.0)


def test_the_end_is_the_last_spans_where_that_is_after_the_makespan() -> None:
    assert Timeline("t", (span(0, 0, 3),), 2.0, 0.0).end_s == 3
    assert Timeline("t", (span(0, 0, 1),), 2.0, 0.0).end_s == 2


def test_overlapping_spans_never_make_the_bubble_negative() -> None:
    assert Timeline.from_spans("t", [span(0, 0, 2), span(0, 0, 2)]).bubble == 0.0


def test_a_report_keeps_its_own_environment(report: RunReport) -> None:
    mine = {"torch": "2.13"}
    made = RunReport("t", "s", (), (), report.measured, report.simulated, environment=mine)
    mine["torch"] = "changed"
    assert made.environment["torch"] == "2.13"
    with pytest.raises(TypeError):
        made.environment["torch"] = "changed"  # type: ignore[index]
