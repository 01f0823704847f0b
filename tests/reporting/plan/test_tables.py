from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from partita.reporting import LossPoint, RunReport, loss_table, plan_table


def printed(table: Table, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plan_shows_every_stage_and_the_sums(report: RunReport) -> None:
    lines = printed(plan_table(report.stages)).splitlines()
    (middle,) = [line for line in lines if "layers.4-8" in line]
    for words in ("3.94 M (15.0 MiB)", "8.80 ms", "18.1 ms", "1.00 MiB"):
        assert words in middle
    (sums,) = [line for line in lines if " all " in line]
    for words in ("10.2 M (38.9 MiB)", "26.3 ms", "51.9 ms", "2.00 MiB"):
        assert words in sums


def test_the_last_stage_sends_none(report: RunReport) -> None:
    assert "none" in printed(plan_table(report.stages[2:]))


def test_brackets_in_a_name_are_no_markup(report: RunReport) -> None:
    rows = [replace(report.stages[0], modules=("[bold]blocks[/bold]",))]
    assert "[bold]blocks[/bold]" in printed(plan_table(rows))


def test_a_long_name_folds_and_loses_nothing(report: RunReport) -> None:
    name = "".join(chr(ord("a") + number % 26) for number in range(200))
    table = printed(plan_table([replace(report.stages[0], modules=(name,))]))
    letters = "".join(line.split("│")[3].strip() for line in table.splitlines() if "│" in line)
    assert letters == name


def test_an_empty_plan_is_an_empty_table() -> None:
    assert plan_table([]).row_count == 0


@pytest.mark.parametrize(("last", "rows"), [(None, 60), (5, 5), (0, 0), (99, 60)])
def test_losses_can_be_limited_to_the_last(
    last: int | None, rows: int, make_losses: Callable[..., tuple[LossPoint, ...]]
) -> None:
    assert loss_table(make_losses(60), last).row_count == rows


def test_the_last_losses_are_the_latest(make_losses: Callable[..., tuple[LossPoint, ...]]) -> None:
    assert "│   59 │" in printed(loss_table(make_losses(60), 1))


def test_a_negative_number_of_losses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"last is -1; give how many steps to show"):
        loss_table([], -1)


def test_a_loss_that_is_nan_is_named() -> None:
    assert printed(loss_table([LossPoint(0, math.nan, 1.0)])).count("NaN") == 2
