"""Files with plans and schedules are told apart by what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.cli.options.schedule_file import read_schedule_file
from partita.errors import UsageError
from partita.planning import CostModel, Plan, Schedule, Unit, get_schedule, plan_stages


def test_the_name_of_a_file_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    schedule = get_schedule("GPipe")(2, 2)
    path.write_text(schedule.to_json())
    assert read_schedule_file(path) == schedule
    path.write_text(schedule.to_csv())
    read = read_schedule_file(path)
    assert isinstance(read, Schedule)
    assert (read.rows, read.name) == (schedule.rows, "order")
    units = tuple(Unit(f"block{n}", 0.001, 0.002) for n in range(4))
    plan = plan_stages(CostModel(units, (8,) * 3), 2)
    path.write_text(plan.to_json())
    assert isinstance(read_schedule_file(path), Plan)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As those that a spreadsheet writes: it was read as a part of the first action."""
    path = tmp_path / "order.csv"
    schedule = get_schedule("GPipe")(2, 2)
    for text in (schedule.to_csv(), schedule.to_json()):
        path.write_text(text, encoding="utf-8-sig")
        read = read_schedule_file(path)
        assert isinstance(read, Schedule)
        assert read.rows == schedule.rows


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no text"):
        read_schedule_file(path)
