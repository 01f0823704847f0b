from __future__ import annotations

import math

import pytest

from partita.reporting import Figure, RunReport, key_figures


def figures(
    report: RunReport, difference: float, reference: float = 100.0, bitwise: bool = True
) -> tuple[Figure, ...]:
    return key_figures(
        parameter_difference=difference,
        bitwise_equal=bitwise,
        pipelined_samples_s=150.0,
        reference_samples_s=reference,
        measured=report.measured,
        simulated=report.simulated,
    )


def test_no_difference_is_good_news(report: RunReport) -> None:
    proof = figures(report, 0.0)[0]
    assert (proof.value, proof.tone, proof.note) == (0.0, "good", "equal bit for bit")


def test_equal_bits_are_claimed_only_where_they_were_compared(report: RunReport) -> None:
    assert figures(report, 0.0, bitwise=False)[0].note == "equal in value"


@pytest.mark.parametrize("difference", [1e-12, math.nan, math.inf])
def test_any_difference_is_bad_news(report: RunReport, difference: float) -> None:
    assert figures(report, difference)[0].tone == "bad"


def test_speeds_are_compared(report: RunReport) -> None:
    assert figures(report, 0.0)[1].note == "1.50 times the uncut model"


def test_without_a_reference_speed_nothing_is_compared(report: RunReport) -> None:
    assert figures(report, 0.0, reference=0.0)[1].note == ""


def test_both_bubbles_are_shown(report: RunReport) -> None:
    assert [figure.value for figure in figures(report, 0.0)[3:]] == ["24.7 %", "23.8 %"]
