"""A step as the ranks have written it down, in the form that reports draw."""

from __future__ import annotations

from typing import Any

import pytest

from partita.demo.timelines import traced_timeline


def event(category: str, name: str, rank: int, start_s: float, end_s: float) -> dict[str, Any]:
    return {"category": category, "name": name, "rank": rank, "start_s": start_s, "end_s": end_s}


def test_while_an_action_waits_for_its_message_it_does_not_compute() -> None:
    timeline = traced_timeline(
        [
            event("compute", "0F0", 0, 10.0, 11.0),
            event("compute", "1F0", 1, 10.0, 13.0),
            event("wait", "wait 1F0", 1, 10.0, 12.0),
            event("comm", "0SEND_F0", 0, 11.0, 12.0),
        ]
    )
    computed = sorted((span for span in timeline.spans if span.is_compute), key=lambda span: span.rank)
    assert [(span.label, span.start_s, span.end_s) for span in computed] == [
        ("0F0", 0.0, 1.0),
        ("1F0", 2.0, 3.0),
    ]
    assert timeline.makespan_s == 3.0
    assert timeline.bubble == pytest.approx(1 - 2 / 6)
