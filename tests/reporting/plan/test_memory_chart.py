from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import MemoryLane
from partita.reporting.plan.memory_chart import memory_chart

amounts = st.floats(0, 1e15)
lanes = st.lists(
    st.builds(
        lambda rank, steps, limit: MemoryLane(rank, tuple(sorted(steps)), limit),
        st.integers(0, 70),
        st.lists(st.tuples(st.floats(0, 1e4), amounts), min_size=1, max_size=30),
        st.none() | amounts,
    ),
    max_size=6,
)


@given(lanes, st.floats(0, 1e4))
def test_every_lane_is_an_outline_inside_the_drawing(made: list[MemoryLane], end_s: float) -> None:
    drawing = ElementTree.fromstring(memory_chart(made, end_s))
    height = float(drawing.get("height", "nan"))
    outlines = list(drawing.iter("polygon"))
    assert len(outlines) == len(made)
    for outline in outlines:
        for corner in (outline.get("points") or "").split():
            x, y = map(float, corner.split(","))
            assert 61 <= x <= 1040
            assert -0.01 <= y <= height


def test_a_lane_above_its_limit_is_marked_and_its_peak_written() -> None:
    drawing = memory_chart([MemoryLane(0, ((0.0, 2.0), (1.0, 5.0), (2.0, 1.0)), 4.0)], 3.0, "microbatches")
    root = ElementTree.fromstring(drawing)
    assert [one.get("class") for one in root.iter("polygon")] == ["held over"]
    assert "rank 0: at most 5 microbatches\n2 microbatches all the time\nlimit 4 microbatches" in drawing


def test_what_falls_on_one_pixel_is_drawn_as_its_highest() -> None:
    many = tuple((step * 1e-6, 10.0 if step == 500 else 1.0) for step in range(1000))
    root = ElementTree.fromstring(memory_chart([MemoryLane(0, many)], 1.0))
    (outline,) = root.iter("polygon")
    heights = [float(corner.split(",")[1]) for corner in (outline.get("points") or "").split()]
    assert len(heights) < 20
    assert min(heights) == 10  # the top of the lane
    assert heights[-2] > 50  # and down again afterwards
