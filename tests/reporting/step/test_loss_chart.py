from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import LossPoint
from partita.reporting.step.loss_chart import difference_summary, loss_chart, thin_out

any_loss = st.floats()
any_losses = st.lists(st.tuples(any_loss, any_loss), max_size=12).map(
    lambda pairs: [LossPoint(step, *pair) for step, pair in enumerate(pairs)]
)


def parts(drawing: str, name: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(drawing).iter() if one.get("class") == name]


def coordinates(drawing: str) -> Iterator[tuple[str, float]]:
    for one in ElementTree.fromstring(drawing).iter():
        for axis, names in (("x", ("x", "x1", "x2", "cx")), ("y", ("y", "y1", "y2", "cy"))):
            yield from ((axis, float(one.get(name, "0"))) for name in names)
        for pair in one.get("points", "").split():
            yield from zip("xy", map(float, pair.split(",")), strict=True)


@given(any_losses, any_losses, st.sampled_from([372.0, 1040.0]))
def test_whatever_the_losses_all_is_drawn_inside(
    losses: list[LossPoint], validation: list[LossPoint], width: float
) -> None:
    drawing = loss_chart(losses, validation, width=width)
    height = float(ElementTree.fromstring(drawing).get("height", "nan"))
    for axis, value in coordinates(drawing):
        assert 0 <= value <= (width if axis == "x" else height)


def test_both_curves_are_drawn_the_wide_one_first(make_losses: Callable[..., tuple[LossPoint, ...]]) -> None:
    drawing = loss_chart(make_losses(60))
    (below,), (above,) = parts(drawing, "curve reference"), parts(drawing, "curve pipelined")
    assert below.get("points") == above.get("points")
    assert drawing.index("curve reference") < drawing.index("curve pipelined")


def test_a_nan_breaks_the_curve_and_is_marked() -> None:
    losses = [LossPoint(step, math.nan if step == 2 else 1.0 + step, 1.0) for step in range(5)]
    drawing = loss_chart(losses)
    assert len(parts(drawing, "curve pipelined")) == 2
    assert len(parts(drawing, "curve reference")) == 1
    assert len(parts(drawing, "cross")) == 2  # one on the curves, one on the differences


def test_one_step_is_a_dot() -> None:
    drawing = loss_chart([LossPoint(0, 2.0, 2.0)])
    assert len(parts(drawing, "dot pipelined")) == len(parts(drawing, "dot reference")) == 1


def test_only_steps_that_differ_have_a_stem() -> None:
    drawing = loss_chart([LossPoint(0, 1.0, 1.0), LossPoint(1, 2.0, 1.0), LossPoint(2, 1.0, 1.5)])
    assert len(parts(drawing, "stem")) == 2


def test_each_step_tells_its_numbers_under_the_pointer() -> None:
    columns = parts(loss_chart([LossPoint(7, 2.0, 1.5)]), "column")
    assert [column[0].text for column in columns] == [
        "step 7\npipelined 2.00000\nuncut 1.50000\ndifference 0.500"
    ]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 60, 1000])
def test_steps_are_labelled_with_whole_numbers(
    steps: int, make_losses: Callable[..., tuple[LossPoint, ...]]
) -> None:
    drawing = ElementTree.fromstring(loss_chart(make_losses(steps)))
    bottom = float(drawing.get("height", "nan")) - 20
    labels = [
        one.text
        for one in drawing.iter("text")
        if float(one.get("y", "0")) > bottom and one.get("text-anchor") == "middle"
    ]
    assert labels[0] == "0"
    assert all((label or "").replace(",", "").isdigit() for label in labels)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "no losses were recorded"),
        ([LossPoint(0, 1.0, 1.0)], "0.0 at the only step"),
        ([LossPoint(0, 1.0, 1.0), LossPoint(1, 2.0, 2.0)], "0.0 at all 2 steps"),
        ([LossPoint(0, 1.5, 1.0), LossPoint(1, 2.0, 2.0)], "up to 0.500, at 1 of 2 steps"),
        (
            [LossPoint(0, 1.5, 1.0), LossPoint(1, math.nan, 2.0), LossPoint(2, 1.0, 1.0)],
            "not 0.0 at 2 of 3 steps, and one side is not a finite number at one of them",
        ),
    ],
)
def test_the_summary_says_whether_they_coincide(losses: list[LossPoint], said: str) -> None:
    assert difference_summary(losses) == said


def test_a_long_run_keeps_its_spike_and_its_one_difference() -> None:
    losses = [LossPoint(step, 1.0, 1.0) for step in range(50_000)]
    losses[12_345] = LossPoint(12_345, 9.0, 9.0)
    losses[23_456] = LossPoint(23_456, 1.0 + 1e-9, 1.0)
    kept = thin_out(losses, 400)
    assert len(kept) <= 401
    assert {losses[0], losses[12_345], losses[23_456], losses[-1]} <= set(kept)
    assert [point.step for point in kept] == sorted({point.step for point in kept})


def test_a_short_run_is_kept_whole(make_losses: Callable[..., tuple[LossPoint, ...]]) -> None:
    assert thin_out(make_losses(60), 60) == make_losses(60)
