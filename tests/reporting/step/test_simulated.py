from __future__ import annotations

import pytest

from partita.planning import Cluster, Schedule, StageCost, get_schedule, simulate
from partita.reporting import simulation_timeline


def test_a_timeline_has_the_step_and_on_wish_its_messages() -> None:
    costs = [StageCost(1.0, 2.0)] * 2
    step = simulate(get_schedule("GPipe")(2, 2), costs, Cluster(2, latency_s=0.5))
    timeline = simulation_timeline(step, "GPipe")
    assert (timeline.title, timeline.makespan_s) == ("GPipe", step.makespan_s)
    assert timeline.bubble == pytest.approx(step.bubble)
    assert {span.kind for span in timeline.spans} == {"F", "B"}
    messages = [span for span in simulation_timeline(step, transfers=True).spans if span.kind == "comm"]
    assert sorted(span.label for span in messages) == ["0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_B1"]
    assert {span.duration_s for span in messages} == {0.5}


def test_what_gathers_parameters_or_sums_gradients_is_shown_beside_the_passes() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n")
    step = simulate(schedule, [StageCost(1.0, 2.0, unshard_s=1.0, reduce_grad_s=1.0)])
    beside = [span for span in simulation_timeline(step, transfers=True).spans if span.kind == "comm"]
    assert [(span.label, span.stage) for span in beside] == [("0UNSHARD", 0), ("0REDUCE_GRAD", 0)]


def test_passes_that_run_together_belong_to_no_stage() -> None:
    step = simulate(get_schedule("DualPipeV")(4, 8, 2), [StageCost(1.0, 2.0)] * 4)
    together = [span for span in simulation_timeline(step).spans if span.kind == "OVERLAP_F_B"]
    assert together
    assert {span.stage for span in together} == {None}


def test_no_time_at_all_is_a_timeline() -> None:
    step = simulate(get_schedule("GPipe")(2, 2), [StageCost(0.0, 0.0)] * 2)
    assert simulation_timeline(step).makespan_s == 0
