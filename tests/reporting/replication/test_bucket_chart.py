from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from tests.reporting.fake_report import fake_backward

from partita.reporting import BackwardPass, ReducedBucket
from partita.reporting.replication.bucket_chart import bucket_chart


def drawn(backward: BackwardPass, name: str) -> list[tuple[float, float]]:
    """The left and right ends of the rectangles of one class."""
    root = ElementTree.fromstring(bucket_chart(backward))
    rectangles = [item for item in root.iter("rect") if item.get("class") == name]
    return [(float(r.get("x", 0)), float(r.get("x", 0)) + float(r.get("width", 0))) for r in rectangles]


def test_a_bar_goes_from_sent_to_where_the_rank_waits_and_on_to_the_mean() -> None:
    bucket = ReducedBucket(0, ("a",), 8, "float32", 0.2, 0.4, 1.0, 0.4)
    backward = BackwardPass(0, 2, 0.6, (bucket,))
    ((left, right),) = drawn(backward, "lane")

    def at(seconds: float) -> float:
        return left + seconds * (right - left)

    assert drawn(backward, "held") == [pytest.approx((at(0.2), at(0.4)), abs=0.02)]
    assert drawn(backward, "sent") == [pytest.approx((at(0.4), at(0.6)), abs=0.02)]
    assert drawn(backward, "exposed") == [pytest.approx((at(0.6), at(1.0)), abs=0.02)]


def test_what_is_hidden_has_no_exposed_part() -> None:
    bucket = ReducedBucket(0, ("a",), 8, "float32", 0.2, 0.2, 1.0, 0.0)
    assert drawn(BackwardPass(0, 2, 1.0, (bucket,)), "exposed") == []


def test_a_bucket_without_gradients_is_drawn_from_sent_on() -> None:
    bucket = ReducedBucket(0, ("a",), 8, "float32", None, 0.2, 1.0, 0.5)
    chart = bucket_chart(BackwardPass(0, 2, 1.0, (bucket,)))
    assert "no gradient came" in chart
    assert 'class="held"' not in chart


def test_every_bucket_has_a_lane_with_its_number_and_its_times_at_the_pointer() -> None:
    chart = bucket_chart(fake_backward(3))
    root = ElementTree.fromstring(chart)
    assert [item.text for item in root.iter("text")][:3] == ["bucket 0", "bucket 1", "bucket 2"]
    assert "25.0 MiB of float32" in chart
    assert root.get("aria-label", "").startswith("3 buckets of a backward pass of 60.0 ms")


def test_the_axis_is_in_milliseconds() -> None:
    words = [item.text for item in ElementTree.fromstring(bucket_chart(fake_backward())).iter("text")]
    assert words[-1] == "ms"
    assert "10" in words


def test_a_hundred_buckets_and_none_make_a_chart() -> None:
    assert len(drawn(fake_backward(100), "lane")) == 100
    ElementTree.fromstring(bucket_chart(BackwardPass(0, 1, 0.0, ())))


def test_names_are_shown_literally() -> None:
    evil = '<script>"&'
    bucket = replace(fake_backward(1).buckets[0], parameters=(evil,) * 30)
    chart = bucket_chart(BackwardPass(0, 2, 0.06, (bucket,)))
    assert evil not in chart
    assert "18 more" in chart
    ElementTree.fromstring(chart)
