"""The page of any simulated step."""

from __future__ import annotations

import pytest

from partita.cli.output.step_report import step_report
from partita.planning import StageCost, get_schedule, simulate
from partita.reporting import CandidateRow, PlanReport, render_plan_html


def report(seconds: float, limit: float | None) -> PlanReport:
    step = simulate(get_schedule("GPipe")(2, 2), [StageCost(seconds, seconds, activation_bytes=1)] * 2)
    times = step.makespan_s, step.bubble, step.span_s, step.span_bubble
    row = CandidateRow("GPipe", 2, *times, 2.0, fits=limit is None or limit >= 2)
    options = {"title": "t", "subtitle": "s", "limits": [limit] * 2, "left_out": {"VMin": "why"}}
    return step_report(step, [row], unit="microbatches", **options)  # type: ignore[arg-type]


def test_the_figures_are_those_of_the_step() -> None:
    page = report(1.0, None)
    assert [figure.value for figure in page.figures] == ["6.00 s", "33.3 %", "33.3 %", "2"]
    assert page.figures[3].note == "of the fullest rank"
    assert sum(seconds for _, seconds in page.critical) == pytest.approx(6.0)
    assert page.left_out == (("VMin", "why"),)


def test_what_does_not_fit_is_bad_news() -> None:
    assert report(1.0, 1.0).figures[3].tone == "bad"
    assert report(1.0, 2.0).figures[3].tone == "plain"
    assert report(1.0, 2.0).figures[3].note == "a rank may hold 2 microbatches"


def test_a_step_of_no_time_makes_a_page() -> None:
    assert report(0.0, None).critical == ()
    assert render_plan_html(report(0.0, None))
