"""A report as JSON text and back, so that it can be kept and drawn again later.

JSON has no NaN and no infinity, and a diverged run has both: they are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"`` where a number belongs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from partita.errors import ReportError
from partita.reporting.replication.backward_pass import BackwardPass, ReducedBucket
from partita.reporting.step.data import (
    Figure,
    LossPoint,
    RankMemory,
    RunReport,
    StageRow,
    Timeline,
    TimelineSpan,
)

__all__ = ["report_from_json", "report_to_json"]

_FORMAT = "partita.report/1"


def report_to_json(report: RunReport, *, indent: int | None = None) -> str:
    """Write the report as strict JSON (no bare NaN), with a field ``format`` that names the version."""
    return json.dumps({"format": _FORMAT, **_json_value(report)}, indent=indent, allow_nan=False)


def report_from_json(text: str) -> RunReport:
    """Read the report that `report_to_json` wrote.

    Raises:
        ReportError: the text is not JSON, is of another format, or misses a field.
    """
    try:
        tree = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ReportError(f"This is no report that can be read: it is not JSON ({error}).") from error
    version = tree.get("format") if isinstance(tree, dict) else None
    if version != _FORMAT:
        raise ReportError(f"This is no report that can be read: format is {version!r}, expected {_FORMAT!r}.")
    try:
        return RunReport(
            title=tree["title"],
            subtitle=tree["subtitle"],
            stages=tuple(StageRow(**{**row, "modules": tuple(row["modules"])}) for row in tree["stages"]),
            losses=_losses(tree["losses"]),
            measured=_timeline(tree["measured"]),
            simulated=_timeline(tree["simulated"]),
            figures=tuple(Figure(**figure) for figure in tree["figures"]),
            environment=tree["environment"],
            validation=_losses(tree["validation"]),
            backward=_backward(tree.get("backward")),
            memory=tuple(RankMemory(**row) for row in tree.get("memory", ())),
        )
    except (KeyError, TypeError) as error:
        raise ReportError(f"The report lacks a field or has one too many ({error}): write it anew") from error
    except (ValueError, OverflowError, AttributeError) as error:
        raise ReportError(f"The report has a value that can't be read ({error}): write it anew") from error


def _json_value(value: Any) -> Any:
    """Turn dataclasses into dicts, tuples into lists, and numbers that JSON lacks into strings."""
    if is_dataclass(value):
        return {field.name: _json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _losses(rows: list[dict[str, Any]]) -> tuple[LossPoint, ...]:
    # float() also reads the three strings.
    return tuple(LossPoint(row["step"], float(row["pipelined"]), float(row["reference"])) for row in rows)


def _timeline(tree: dict[str, Any]) -> Timeline:
    return Timeline(**{**tree, "spans": tuple(TimelineSpan(**span) for span in tree["spans"])})


def _backward(tree: dict[str, Any] | None) -> BackwardPass | None:
    if tree is None:  # also in a report from before there were backward passes in it
        return None
    buckets = tuple(
        ReducedBucket(**{**row, "parameters": tuple(row["parameters"])}) for row in tree["buckets"]
    )
    return BackwardPass(**{**tree, "buckets": buckets})
