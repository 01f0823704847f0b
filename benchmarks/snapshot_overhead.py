"""How much longer is a step of training when a snapshot is made of each?

One process trains with 100 MB of state (parameters, and AdamW's two moments). Steps with `Snapshots`, which
writes beside training, stand against the same steps without, and against steps that save the checkpoint
themselves (`save_checkpoint`). A step has to be long enough for the disk, and a core has to be free beside
those that compute, so one thread less than there are cores trains, for two seconds a step.

    python -m benchmarks.snapshot_overhead
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from benchmarks.harness import MIN_ROUNDS, Ratio, in_turn, progress_bar, ratio, write_json
from partita.pipelining import save_checkpoint
from partita.pipelining.checkpoints import Snapshots

__all__ = ["Row", "main"]

WIDTH, LAYERS, STEP_S = 1024, 8, 2.0
STEPS = 5
"""In a block."""
QUICK = (32, 2, 0.01)
KEEP = 2


@dataclass(frozen=True)
class Row:
    """One way of saving at each step.

    Attributes:
        way: which one.
        state_mb: what is saved, in 10^6 bytes.
        step_s: of a step without saving, in seconds of the wall clock.
        over_step: how much longer a step takes than without.
    """

    way: str
    state_mb: float
    step_s: float
    over_step: Ratio

    def __str__(self) -> str:
        return (
            f"{self.way:<16}{self.state_mb:6.1f} MB a step of {self.step_s:.2f} s  step with / without "
            f"{self.over_step}"
        )


class _Training:
    """A model whose steps take a given time."""

    def __init__(self, width: int, layers: int, step_s: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(64, width)
        self.passes = 1
        self.step()  # makes the optimizer's state
        while (taken_s := min(self._timed(), self._timed())) < step_s / 2:
            self.passes *= 2
        self.passes = max(1, round(self.passes * step_s / taken_s))

    def _timed(self) -> float:
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def step(self) -> None:
        """Take a step over several batches: the same work each time."""
        for _ in range(self.passes):
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def bytes(self) -> int:
        """The size of the state."""
        values = [*self.model.parameters()]
        values += [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in values)


def _measure(sizes: tuple[int, int, float], rounds: int, done: Callable[[], None]) -> list[Row]:
    """Time blocks of steps; a block that saves ends when its last snapshot is whole."""
    training = _Training(*sizes)
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:
        snapshots = Snapshots(Path(folder) / "snapshots", keep=KEEP)

        def without() -> None:
            for _ in range(STEPS):
                training.step()

        def beside() -> None:
            for _ in range(STEPS):
                training.step()
                snapshots.save(next(numbers), training.model, training.optimizer)
            snapshots.wait()

        def apart() -> None:
            for _ in range(STEPS):
                training.step()
                path = Path(folder) / f"{next(numbers)}"
                save_checkpoint(path, training.model, training.optimizer)
                shutil.rmtree(path)

        rows = []
        for way, subject in (("Snapshots", beside), ("save_checkpoint", apart)):
            subjects = {"without": without, "with": subject}
            seconds = in_turn(subjects, rounds=rounds, clock=time.perf_counter)
            step_s = statistics.median(seconds["without"]) / STEPS
            over = ratio(seconds["with"], seconds["without"])
            rows.append(Row(way, training.bytes / 1e6, step_s, over))
            done()
        snapshots.close()
    return rows


def main(*, quick: bool = False, json_path: Path | None = None, console: Console | None = None) -> list[Row]:
    """Measure, print a line each, and return the figures.

    Args:
        quick: a tiny model: whether it runs, not what it takes.
        json_path: write them there too.
    """
    console = console or Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    try:
        with progress_bar(console, "snapshot overhead", ["Snapshots", "save_checkpoint"]) as done:
            rows = _measure(QUICK if quick else (WIDTH, LAYERS, STEP_S), 2 if quick else MIN_ROUNDS, done)
    finally:
        torch.set_num_threads(threads)
    for row in rows:
        console.print(str(row))
    write_json(json_path, "snapshot_overhead", rows)
    return rows


if __name__ == "__main__":
    main()
