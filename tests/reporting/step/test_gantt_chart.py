from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import RunReport, Timeline, TimelineSpan
from partita.reporting.step.gantt_chart import gantt_chart

kinds = st.sampled_from(["F", "B", "I", "W", "comm", "idle", "optimizer"])
times = st.floats(0, 1e4)
spans = st.builds(
    lambda rank, kind, microbatch, ends: TimelineSpan(
        rank, "x", kind, None, microbatch, min(ends), max(ends)
    ),
    st.integers(0, 70),
    kinds,
    st.none() | st.integers(0, 1000),
    st.tuples(times, times),
)
timelines = st.lists(spans, max_size=20).map(lambda made: Timeline.from_spans("t", made))


def blocks(drawing: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(drawing).iter("rect") if one.get("fill")]


def numbers(drawing: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(drawing).iter("text")
    return [one for one in found if (one.get("class") or "").startswith("number")]


@given(st.lists(timelines, min_size=1, max_size=2))
def test_every_span_but_idle_ones_is_a_block_inside_the_drawing(given_timelines: list[Timeline]) -> None:
    drawing = gantt_chart(given_timelines)
    busy = [span for one in given_timelines for span in one.spans if span.kind != "idle"]
    found = blocks(drawing)
    assert len(found) == len(busy)
    height = float(ElementTree.fromstring(drawing).get("height", "nan"))
    for block in found:
        x, y, wide, high = (float(block.get(name, "nan")) for name in ("x", "y", "width", "height"))
        assert 62 <= x <= x + wide <= 1040
        assert wide > 0
        assert high > 0
        assert 0 <= y <= y + high <= height


def test_a_number_stands_in_a_block_only_where_it_fits(report: RunReport) -> None:
    wide = numbers(gantt_chart([report.measured], width=1040))
    assert len(wide) == 3 * 8 * 2
    assert not numbers(gantt_chart([report.measured], width=260))


def test_no_number_leaves_its_block(report: RunReport) -> None:
    drawing = gantt_chart([report.measured, report.simulated])
    boxes = [
        tuple(float(block.get(name, "nan")) for name in ("x", "y", "width", "height"))
        for block in blocks(drawing)
    ]
    for number in numbers(drawing):
        x, y = float(number.get("x", "nan")), float(number.get("y", "nan"))
        room = 7.0 * len(number.text or "")
        assert any(
            left <= x - room / 2 and x + room / 2 <= left + wide and top <= y - 8 and y <= top + high
            for left, top, wide, high in boxes
        )


def test_both_timelines_share_one_time_scale() -> None:
    def one(title: str, seconds: float) -> Timeline:
        return Timeline.from_spans(title, [TimelineSpan(0, "0F0", "F", 0, 0, 0.0, seconds)])

    short, long = blocks(gantt_chart([one("short", 1.0), one("long", 2.0)]))
    assert float(long.get("width", "0")) == pytest.approx(2 * float(short.get("width", "0")), rel=0.01)


def test_communication_does_not_cover_computation() -> None:
    spans = [TimelineSpan(0, "0F0", "F", 0, 0, 0.0, 1.0), TimelineSpan(0, "send", "comm", 0, 0, 0.0, 1.0)]
    compute, comm = blocks(gantt_chart([Timeline.from_spans("t", spans)]))
    assert float(compute.get("y", "0")) + float(compute.get("height", "0")) <= float(comm.get("y", "0"))


def test_a_block_tells_its_times_under_the_pointer() -> None:
    span = TimelineSpan(2, "5B3", "B", 5, 3, 0.010, 0.0125)
    (block,) = blocks(gantt_chart([Timeline.from_spans("t", [span])]))
    words = "stage 5 backward, microbatch 3 (5B3)\nrank 2, backward\n10.00 to 12.50 ms, takes 2.50 ms"
    assert block[0].text == words


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_every_rank_has_a_lane_and_a_label_that_do_not_touch(
    ranks: int, make_timeline: Callable[..., Timeline]
) -> None:
    drawing = ElementTree.fromstring(gantt_chart([make_timeline(costs=[(0.01, 0.02)] * ranks)]))
    labels = [one for one in drawing.iter("text") if (one.text or "").startswith("rank ")]
    assert [label.text for label in labels] == [f"rank {rank}" for rank in range(ranks)]
    heights = [float(label.get("y", "nan")) for label in labels]
    size = float(labels[0].get("font-size", "nan"))
    assert all(below - above >= size for above, below in pairwise(heights))


def test_thousands_of_spans_stay_a_file_that_opens(make_timeline: Callable[..., Timeline]) -> None:
    timeline = make_timeline(costs=[(0.01, 0.02)] * 32, microbatches=32)
    assert len(timeline.spans) >= 2000
    assert len(gantt_chart([timeline])) < 300 * len(timeline.spans)


def test_a_title_is_shown_as_it_was_written() -> None:
    drawing = gantt_chart([Timeline('<b> & "quotes"', (), 0.0, 0.0)])
    assert '<b> & "quotes"' in "".join(ElementTree.fromstring(drawing).itertext())


def test_a_title_without_end_is_shortened() -> None:
    drawing = gantt_chart([Timeline("t" * 500, (), 0.0, 0.0)])
    heading = next(one for one in ElementTree.fromstring(drawing).iter("tspan"))
    assert heading.text == "t" * 59 + "…"
