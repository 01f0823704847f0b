from __future__ import annotations

import pytest

from partita.errors import ReportError
from partita.reporting import MemoryLane, PlannedStageRow, PlanReport, Timeline


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "has no steps"),
        (((1.0, 1.0), (0.5, 1.0)), "goes back from 1.0 s to 0.5 s"),
        (((0.0, -1.0),), "-1.0"),
    ],
)
def test_steps_that_can_not_be_are_refused(steps: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        MemoryLane(0, steps)


def test_a_stage_takes_forward_and_backward_and_no_negative_bytes() -> None:
    row = PlannedStageRow(0, 0, (), 1, 4, 1.0, 2.0, None, None, 8, 16, 0)
    assert row.time_s == 3.0
    with pytest.raises(ReportError, match=r"PlannedStageRow.kept_bytes is -1"):
        PlannedStageRow(0, 0, (), 1, 4, 1.0, 2.0, None, None, -1, 16, 0)


def test_the_environment_is_copied_and_read_only() -> None:
    given = {"devices": "2"}
    report = PlanReport("t", "", (), Timeline("t", (), 0.0, 0.0), environment=given)
    given["devices"] = "3"
    assert report.environment["devices"] == "2"
    with pytest.raises(TypeError):
        report.environment["devices"] = "4"  # type: ignore[index]
