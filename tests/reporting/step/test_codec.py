from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reporting.fake_report import fake_backward

from partita.errors import ReportError
from partita.reporting import (
    LossPoint,
    RunReport,
    Timeline,
    render_html,
    report_from_json,
    report_to_json,
)


def test_a_report_comes_back_as_it_was(report: RunReport) -> None:
    assert report_from_json(report_to_json(report)) == report


def test_a_backward_pass_comes_back_as_it_was(report: RunReport) -> None:
    given = replace(report, backward=fake_backward())
    assert report_from_json(report_to_json(given)) == given


def test_a_report_from_before_there_were_backward_passes_is_read(report: RunReport) -> None:
    tree = json.loads(report_to_json(report))
    del tree["backward"]
    assert report_from_json(json.dumps(tree)) == report


def test_a_damaged_backward_pass_is_refused(report: RunReport) -> None:
    tree = json.loads(report_to_json(replace(report, backward=fake_backward())))
    del tree["backward"]["buckets"][0]["sent_s"]
    with pytest.raises(ValueError, match="lacks a field or has one too many"):
        report_from_json(json.dumps(tree))


def test_a_report_that_came_back_gives_the_same_page(report: RunReport) -> None:
    assert render_html(report_from_json(report_to_json(report, indent=2))) == render_html(report)


@given(st.floats(), st.floats())
def test_any_loss_survives_strict_json(one: float, other: float) -> None:
    empty = Timeline("t", (), 0.0, 0.0)
    text = report_to_json(RunReport("t", "", (), (LossPoint(0, one, other),), empty, empty))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (back,) = report_from_json(text).losses
    assert (repr(back.pipelined), repr(back.reference)) == (repr(one), repr(other))


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "partita.report/9"}'])
def test_another_format_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected 'partita\.report/1'"):
        report_from_json(text)


@pytest.mark.parametrize("damage", [{"extra": 1}, {"stage": None}])
def test_a_damaged_report_is_refused(report: RunReport, damage: dict[str, object]) -> None:
    tree = json.loads(report_to_json(report))
    tree["stages"][0].update(damage)
    with pytest.raises(ValueError, match=r"lacks a field or has one too many .*write it anew"):
        report_from_json(json.dumps(tree))


def test_a_figure_that_is_not_finite_comes_back_as_its_name(report: RunReport) -> None:
    figure = replace(report.figures[0], value=math.nan)
    back = report_from_json(report_to_json(replace(report, figures=(figure,))))
    assert back.figures[0].value == "NaN"


def test_numbers_that_are_too_large_are_an_error_of_partitas(report: RunReport) -> None:
    tree = json.loads(report_to_json(report))
    tree["losses"] = [{"step": 0, "pipelined": 10**400, "reference": 1.0}]
    with pytest.raises(ReportError, match="has a value that can't be read"):
        report_from_json(json.dumps(tree))
    with pytest.raises(ReportError, match="it is not JSON"):
        report_from_json('{"a": ' + "9" * 5000 + "}")
