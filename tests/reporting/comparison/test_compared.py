from __future__ import annotations

from dataclasses import replace

import pytest
from tests.reporting.fake_report import fake_losses, fake_timeline

from partita.errors import ReportError
from partita.planning import CostModel, Unit, plan_stages
from partita.reporting import (
    ComparedRun,
    RankMemory,
    RunComparison,
    RunReport,
    compared_plan,
    compared_report,
)


def test_a_report_and_a_plan_stand_side_by_side(report: RunReport) -> None:
    plan = plan_stages(
        CostModel(tuple(Unit(name, 1.0, 2.0) for name in "ab"), crossing_bytes=(0,)), 2, schedule="GPipe"
    )
    with_memory = replace(report, memory=(RankMemory(0, 5.0, 7.0), RankMemory(1, 5.0, 9.0)))
    comparison = RunComparison("t", (compared_report(with_memory, "run"), compared_plan(plan, "plan")))
    run, planned = comparison.runs
    assert (run.kind, run.schedule, run.stages, run.ranks) == ("measured", "1F1B", 3, 3)
    assert (run.samples_s, run.peak_bytes) == (138.4, 9.0)
    assert (planned.kind, planned.schedule, planned.stages, planned.ranks) == ("simulated", "GPipe", 2, 2)
    lines = {line.name: line for line in comparison.quantities}
    assert lines["Step"].best == {0}
    assert lines["Samples a second"].values == (138.4, None)
    assert lines["Samples a second"].best == frozenset()
    assert "Tokens a second" not in lines
    assert comparison.losses_differ is None


def test_the_first_loss_that_differs_is_found(report: RunReport) -> None:
    losses = list(fake_losses())
    losses[7] = replace(losses[7], pipelined=1.0)
    runs = compared_report(report, "a"), compared_report(replace(report, losses=tuple(losses)), "b")
    assert RunComparison("t", runs).losses_differ == 7
    assert RunComparison("t", (runs[0], replace(runs[0], name="c"))).losses_differ is None


@pytest.mark.parametrize(
    ("names", "message"), [(["a"], "1 run: give two"), (["a", "a"], "two runs are called 'a'")]
)
def test_what_can_not_be_compared_is_refused(names: list[str], message: str) -> None:
    runs = tuple(ComparedRun(name, "measured", "", 3, fake_timeline()) for name in names)
    with pytest.raises(ReportError, match=message):
        RunComparison("t", runs)
