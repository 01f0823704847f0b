"""A step as it was traced, and as it is simulated, in the form that reports draw."""

from __future__ import annotations

from typing import Any

import pytest

from partita.demo.timelines import measured_timeline, simulated_timeline
from partita.planning import CostModel, Unit, plan_stages


def event(category: str, name: str, rank: int, start_s: float, end_s: float) -> dict[str, Any]:
    return {"category": category, "name": name, "rank": rank, "start_s": start_s, "end_s": end_s}


def test_while_an_action_waits_for_its_message_it_does_not_compute() -> None:
    timeline = measured_timeline(
        [
            event("compute", "0F0", 0, 10.0, 11.0),
            event("compute", "1F0", 1, 10.0, 13.0),
            event("wait", "wait 1F0", 1, 10.0, 12.0),
            event("send", "0SEND_F0", 0, 11.0, 12.0),
        ]
    )
    assert [(span.label, span.start_s, span.end_s) for span in timeline.spans] == [
        ("0F0", 0.0, 1.0),
        ("1F0", 2.0, 3.0),
    ]
    assert timeline.makespan_s == 3.0
    assert timeline.bubble == pytest.approx(1 - 2 / 6)


def test_a_simulated_step_has_every_action_of_the_plan() -> None:
    costs = CostModel(tuple(Unit(name, 1.0, 2.0) for name in "ab"), crossing_bytes=(0,))
    timeline = simulated_timeline(plan_stages(costs, 2, schedule="GPipe", microbatches=2))
    labels = sorted(span.label for span in timeline.spans)
    assert labels == ["0B0", "0B1", "0F0", "0F1", "1B0", "1B1", "1F0", "1F1"]
    assert timeline.makespan_s == 9.0
