"""Files that hold a schedule: torch's CSV, a schedule in JSON, or a plan, told apart by what is in them."""

from __future__ import annotations

from pathlib import Path

from partita.errors import UsageError
from partita.planning import Plan, Schedule

__all__ = ["read_schedule_file"]

_WAY_OUT = "give what partita plan --out or to_json() wrote, or torch's CSV"


def read_schedule_file(path: Path) -> Plan | Schedule:
    """Read a plan or a schedule. A schedule from CSV is called by the name of its file.

    Raises:
        UsageError: the file can't be read.
        PlanError: it holds neither; a ScheduleError says which cell of a CSV is wrong.
    """
    text = _read(path)
    if text.lstrip().startswith("["):
        raise UsageError(f"{path} holds a list in JSON, and no plan or schedule: {_WAY_OUT}")
    if not text.lstrip().startswith("{"):
        return Schedule.from_csv(text, name=path.stem)
    if '"partita.schedule"' in text[:200]:
        return Schedule.from_json(text)
    return Plan.from_json(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): give a plan or a schedule") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text ({error.reason}): give a plan or a schedule") from error
