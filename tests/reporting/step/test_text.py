from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import Timeline, TimelineSpan, timeline_drawing, timeline_text

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


def test_a_character_shows_what_takes_most_of_its_time() -> None:
    made = [
        TimelineSpan(0, "0F0", "F", 0, 0, 0.0, 0.2),
        TimelineSpan(0, "0B0", "B", 0, 0, 0.2, 1.0),
        TimelineSpan(0, "0F1", "F", 0, 1, 19.0, 20.0),
    ]
    lane = timeline_text(Timeline.from_spans("t", made), 28).splitlines()[1]
    assert lane == "rank 0  B" + "." * 18 + "F"


def test_a_legend_names_the_letters_and_second_stages_are_paler() -> None:
    made = [
        TimelineSpan(0, "0F0", "F", 0, 0, 0.0, 1.0),
        TimelineSpan(0, "3F0", "F", 3, 0, 1.0, 2.0),
        TimelineSpan(0, "0B0", "B", 0, 0, 2.0, 3.0),
    ]
    drawing = timeline_drawing(Timeline.from_spans("t", made), 68)
    assert drawing.plain.splitlines()[-1] == "F forward  B backward  0 microbatch  - goes on  . waiting"
    looks = [str(span.style) for span in drawing.spans if " on #" in str(span.style)]
    assert len(set(looks[:3])) == 3


def test_of_many_ranks_some_are_drawn_and_it_is_said() -> None:
    made = [TimelineSpan(rank, "F", "F", rank, 0, 0.0, 1.0) for rank in range(50)]
    timeline = Timeline.from_spans("t", made)
    lines = timeline_drawing(timeline, 40, most_lanes=5).plain.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("rank")] == ["0", "12", "24", "37", "49"]
    assert "5 of 50 ranks are shown" in lines


@given(st.lists(spans, max_size=20), st.integers(20, 60), st.integers(1, 5))
def test_no_line_of_a_drawing_is_too_long(made: list[TimelineSpan], width: int, most: int) -> None:
    drawing = timeline_drawing(Timeline.from_spans("Measured", made), width, most_lanes=most)
    assert all(len(line) <= width for line in drawing.plain.splitlines())
