"""The pieces of a model as data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from partita.errors import ReportError
from partita.reporting import CrossingRow, PieceRow, StagesReport, TiedRow

EVIL = "<script>alert(1)</script>[bold]"


def model_report(stages: int = 4) -> StagesReport:
    """Stages of which some are skipped, with names that would be markup."""
    pieces = tuple(PieceRow(n, (f"layers.{n}", EVIL), 3, 1000 * n, 4000 * n, 0) for n in range(stages))
    ways = [(n, n + 1) for n in range(stages - 1)] + [(0, 2), (1, 3)]
    crossings = tuple(CrossingRow(*way, (f"x: float32[{EVIL}]",), 64, 64) for way in ways)
    return StagesReport(f"a model {EVIL}", "proven", pieces, crossings, (TiedRow((EVIL, "b"), (0, 3), 40),))


def test_data_that_contradicts_itself_is_refused() -> None:
    piece = PieceRow(0, (), 1, 0, 0, 0)
    with pytest.raises(ReportError, match="not those of stages 0, 1, 2"):
        StagesReport("a", "", (replace(piece, stage=1),))
    with pytest.raises(ReportError, match="1 pieces and a crossing to stage 1"):
        StagesReport("a", "", (piece,), (CrossingRow(0, 1, (), 0, 0),))
    with pytest.raises(ReportError, match="from stage 1 to 1; give a later stage"):
        CrossingRow(1, 1, (), 0, 0)
    with pytest.raises(ReportError, match=r"PieceRow.parameters is -1"):
        replace(piece, parameters=-1)


def test_the_values_are_plain() -> None:
    report = model_report()
    answer = json.loads(json.dumps(report.as_dict()))
    assert [stage["parameters"] for stage in answer["stages"]] == [0, 1000, 2000, 3000]
    assert answer["crossings"][-1]["receiver"] == 3
    assert answer["tied"] == [{"names": [EVIL, "b"], "stages": [0, 3], "bytes": 40}]
    assert [row.sender for row in report.entering(2)] == [1, 0]
