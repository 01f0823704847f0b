"""How every benchmark measures: both sides in one run, in turn, and what is reported is the ratio.

    warm-up   A B
    rounds    A B   A B   A B   A B   A B       at least five; the median of the ratios, and their spread

An absolute time says little on a machine that others use too; the two sides of a pair met the same weather.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import partita
from partita.errors import UsageError

__all__ = [
    "MIN_ROUNDS",
    "Ratio",
    "chosen_cells",
    "environment",
    "first_line",
    "in_turn",
    "progress_bar",
    "ratio",
    "slope",
    "write_json",
]

MIN_ROUNDS = 5


@dataclass(frozen=True)
class Ratio:
    """How much longer one side took than the other.

    Attributes:
        median: of the ratios of all rounds.
        low: the smallest.
        high: the largest.
        rounds: how many there were.
    """

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def in_turn(
    subjects: Mapping[str, Callable[[], object]],
    *,
    rounds: int = MIN_ROUNDS,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Run the subjects one after the other, ``rounds`` times after a warm-up of one.

    Args:
        subjects: each takes nothing; what it returns is dropped outside the measured time.
        rounds: of measurement.
        clock: CPU time of this process in seconds, unless another is given.

    Returns:
        For each subject the seconds of every round.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give at least 1 ({MIN_ROUNDS} for a figure that is published)")
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    gc.collect()
    gc.freeze()  # what was there before is nobody's garbage, and walking it each time empties the caches
    try:
        for number in range(rounds + 1):
            for name, subject in subjects.items():
                gc.collect()
                started = clock()
                result = subject()
                taken = clock() - started
                del result
                if number:
                    seconds[name].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def chosen_cells(cells: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the cells of a table that a pattern of the shell matches; without patterns, all of them.

    Args:
        cells: names whose parts are divided by slashes, such as ``mlp/2/0.3/DDP``.
        only: patterns, such as ``mlp/2/*``.

    Raises:
        UsageError: a pattern matches nothing.

    >>> chosen_cells(["mlp/2/DDP", "mlp/4/DDP"], ["*/4/*"])
    ['mlp/4/DDP']
    """
    for pattern in only:
        if not any(fnmatchcase(cell, pattern) for cell in cells):
            raise UsageError(f"--only {pattern!r} matches no cell; the first of {len(cells)} is {cells[0]!r}")
    return [cell for cell in cells if not only or any(fnmatchcase(cell, pattern) for pattern in only)]


@contextmanager
def progress_bar(console: Console, title: str, tasks: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Show a bar on ``console``, where that is a terminal, until the block ends.

    Args:
        title: what is measured.
        tasks: what is done, one after the other.

    Returns:
        What to call when a task is done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        ahead = iter([*tasks, "done"])
        task = progress.add_task(f"{title}: {next(ahead)}", total=len(tasks))

        def done() -> None:
            progress.update(task, advance=1, description=f"{title}: {next(ahead)}")

        yield done


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return the ratio of two subjects of one `in_turn`, round by round.

    >>> print(ratio([2.0, 4.0, 3.0], [1.0, 1.0, 1.0]))
    3.00 (2.00 to 4.00)
    """
    ratios = [above / below for above, below in zip(numerator, denominator, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of log time over log size by least squares: 1 is linear, 2 quadratic.

    >>> round(slope([10, 100, 1000], [1.0, 10.0, 100.0]), 3)
    1.0
    """
    if len(set(sizes)) < 2:
        return math.nan
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds]).slope


def environment() -> dict[str, Any]:
    """Return what a figure depends on besides the code."""
    return {
        "partita": partita.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def first_line(error: BaseException) -> str:
    """What a table says of an error: its class, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def write_json(path: Path | None, name: str, rows: Sequence[Any]) -> None:
    """Write the rows of one benchmark (dataclasses) with the environment, where a path is given."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "environment": environment(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
