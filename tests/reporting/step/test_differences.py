from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reporting.fake_report import fake_timeline

from partita.planning import StageCost, get_schedule, simulate
from partita.reporting import RunReport, Timeline, TimelineSpan, simulation_timeline, step_differences
from partita.reporting.step.differences import differences_text, time_use


def span(label: str, kind: str, start_s: float, end_s: float, rank: int = 0) -> TimelineSpan:
    return TimelineSpan(rank, label, kind, rank, 0, start_s, end_s)


MEASURED = Timeline.from_spans(
    "Measured",
    [
        span("0F0", "F", 0.0, 2.0),
        span("0SEND_F0", "handling", 2.0, 2.5),
        span("wait 0B0", "idle", 3.0, 6.0),
        span("0B0", "B", 6.0, 9.0),
        span("wait 1F0", "idle", 0.0, 3.0, 1),
        span("1F0", "F", 3.0, 4.0, 1),
        span("1B0", "B", 4.0, 5.0, 1),
    ],
)
SIMULATED = Timeline.from_spans(
    "Simulated",
    [
        span("0F0", "F", 0.0, 1.0),
        span("0B0", "B", 3.0, 5.0),
        span("1F0", "F", 1.0, 2.0, 1),
        span("1B0", "B", 2.0, 3.0, 1),
    ],
)


def test_the_parts_of_a_rank_are_its_step() -> None:
    use = time_use(MEASURED, 0)
    assert (use.computing_s, use.waiting_s, use.messages_s, use.python_s) == (5.0, 3.0, 0.5, 0.5)
    use = time_use(MEASURED, 1)
    assert (use.computing_s, use.waiting_s, use.messages_s, use.python_s) == (2.0, 7.0, 0.0, 0.0)
    assert time_use(SIMULATED, 1).waiting_s == 3.0


def test_what_came_before_a_pass_belongs_to_it() -> None:
    differences = step_differences(MEASURED, SIMULATED)
    assert differences is not None
    row = next(row for row in differences.actions if (row.stage, row.kind) == (0, "B"))
    assert (row.computing_s, row.simulated_s) == (3.0, 2.0)
    assert (row.waiting_s, row.simulated_wait_s, row.python_s) == (3.0, 2.0, 1.0)
    assert row.difference_s == 3.0


@given(st.integers(0, 50), st.floats(0, 0.5), st.integers(1, 6))
def test_the_causes_add_up_to_the_difference_of_the_steps(seed: int, noise: float, microbatches: int) -> None:
    ours = fake_timeline("Measured", noise=noise, seed=seed, microbatches=microbatches)
    theirs = fake_timeline("Simulated", microbatches=microbatches)
    differences = step_differences(ours, theirs)
    assert differences is not None
    gap = ours.makespan_s - theirs.makespan_s
    assert sum(seconds for _, seconds in differences.causes) == pytest.approx(gap, abs=1e-12)


def test_a_sentence_names_the_largest_cause_first() -> None:
    differences = step_differences(MEASURED, SIMULATED)
    assert differences is not None
    assert differences_text(differences, MEASURED, SIMULATED) == (
        "The measured step is 4.00 s (80.0 %) longer than the simulated one. On average over the ranks: "
        "waiting +2.50 s, computing +1.00 s, starting messages +250 ms, Python +250 ms."
    )


def test_steps_of_other_ranks_are_not_compared(report: RunReport) -> None:
    assert step_differences(MEASURED, report.simulated) is None
    assert step_differences(replace(MEASURED, spans=()), SIMULATED) is None


def test_passes_that_run_together_are_compared_too() -> None:
    """An overlap of forward and backward has no stage of its own."""
    schedule = get_schedule("DualPipeV")(4, 8, 2)
    timeline = simulation_timeline(simulate(schedule, [StageCost(1.0, 2.0)] * 4))
    differences = step_differences(timeline, timeline)
    assert differences is not None
    assert all(seconds == 0 for _, seconds in differences.causes)
