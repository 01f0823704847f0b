from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import Timeline, TimelineSpan, timeline_text

times = st.floats(0, 100)
spans = st.builds(
    lambda rank, kind, microbatch, ends: TimelineSpan(
        rank, "x", kind, None, microbatch, min(ends), max(ends)
    ),
    st.integers(0, 12),
    st.sampled_from(["F", "B", "I", "W", "comm", "idle", "optimizer"]),
    st.none() | st.integers(0, 99),
    st.tuples(times, times),
)


@given(st.lists(spans, max_size=20), st.integers(20, 200))
def test_no_line_is_longer_than_the_width_and_every_rank_has_one(
    made: list[TimelineSpan], width: int
) -> None:
    timeline = Timeline.from_spans("Measured", made)
    lines = timeline_text(timeline, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len([line for line in lines if line.startswith("rank ")]) == len(timeline.ranks)


def test_one_f_one_b_reads_as_it_is_drawn_in_papers(make_timeline: Callable[..., Timeline]) -> None:
    timeline = make_timeline("Simulated", costs=[(0.001, 0.002)] * 2, microbatches=3)
    assert timeline_text(timeline, 56) == "\n".join(
        [
            "Simulated  12.0 ms, bubble 25.0 %",
            "rank 0  F0--F1--........B0------F2--B1------....B2------",
            "rank 1  ....F0--B0------F1--B1------F2--B2------........",
            "        0                                        12.0 ms",
        ]
    )


def test_a_block_too_narrow_for_its_number_shows_its_kind(make_timeline: Callable[..., Timeline]) -> None:
    lanes = timeline_text(make_timeline(microbatches=24), 40).splitlines()[1:-1]
    assert all(set(lane[8:]) <= set("FB0123456789.-") for lane in lanes)
    assert "F" in lanes[0]


def test_computation_is_written_over_communication() -> None:
    made = [TimelineSpan(0, "send", "comm", 0, 0, 0.0, 1.0), TimelineSpan(0, "0F7", "F", 0, 7, 0.0, 0.5)]
    assert timeline_text(Timeline.from_spans("t", made), 28).splitlines()[1] == "rank 0  F7--------~~~~~~~~~~"


def test_nothing_recorded_is_said() -> None:
    assert timeline_text(Timeline("t", (), 0.0, 0.0)).splitlines()[1] == "no spans were recorded"


def test_a_width_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width is 19; a timeline needs 20 characters or more"):
        timeline_text(Timeline("t", (), 0.0, 0.0), 19)
