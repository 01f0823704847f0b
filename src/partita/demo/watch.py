"""The progress of training processes, shown while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from partita.demo.events import EventReader
from partita.reporting import format_loss

__all__ = ["Side", "train_and_watch"]

_LOOK_EVERY_S = 0.1


@dataclass
class Side:
    """One of the two trainings, as its events come in.

    Loss, seconds and validation loss by step; spans of the last step; the most bytes that each rank held.
    """

    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[int, int] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Note one event of a training process."""
        kind = event["kind"]
        if kind == "step":
            self.losses[event["step"]], self.seconds[event["step"]] = event["loss"], event["seconds"]
        elif kind == "validation":
            self.validation[event["step"]] = event["loss"]
        elif kind == "span":
            self.spans.append(event)
        elif kind == "memory" and event["bytes"] is not None:
            self.memory[event["rank"]] = event["bytes"]

    def samples_per_second(self, batch: int) -> float:
        """Return the speed of the median step, without the first one, which warms up."""
        ordered = sorted(seconds for step, seconds in self.seconds.items() if step or len(self.seconds) == 1)
        return batch / ordered[len(ordered) // 2]


def train_and_watch(
    run: Callable[[], Any],
    progress: Progress,
    title: str,
    steps: int,
    paths: Sequence[Path],
    other: Side | None = None,
) -> Side:
    """Run a training while a thread shows what its processes report.

    ``run`` stays on the main thread, because the launcher wants it for its signals.

    Args:
        run: starts the processes and waits for them.
        paths: the event files that they write.
        other: a training to compare each step's loss with, line by line.

    Returns:
        Everything that the processes have reported.
    """
    side = Side()
    task = progress.add_task(title, total=steps)
    readers = [EventReader(path) for path in paths]
    done = threading.Event()
    seen: Future[None] = Future()

    def take_what_is_new() -> None:
        before = len(side.losses)
        for reader in readers:
            for event in reader.new():
                side.take(event)
        for step in range(before, len(side.losses)):
            progress.update(task, advance=1)
            if other is not None:
                progress.console.print(_loss_line(step, side, other))

    def look() -> None:
        try:
            while not done.wait(_LOOK_EVERY_S):
                take_what_is_new()
            take_what_is_new()
            seen.set_result(None)
        except Exception as error:  # the main thread raises it
            seen.set_exception(error)

    thread = threading.Thread(target=look, name="partita-demo-progress", daemon=True)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    seen.result()
    return side


def _loss_line(step: int, cut: Side, uncut: Side) -> str:
    left, right = cut.losses[step], uncut.losses[step]
    verdict = "[green]equal[/]" if left == right else f"[red]differ by {abs(left - right):.3g}[/]"
    return f"step {step:>4}  loss cut {format_loss(left)}  uncut {format_loss(right)}  {verdict}"
