"""A progress bar for what takes longer than a second, on the terminal's error stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["progress_bar"]

_PATIENCE_S = 1.0


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that takes the share of the work that is done, from 0.0 to 1.0.

    The bar appears once a second has gone by, and leaves nothing behind. Where the error stream is no
    terminal, nothing is written.
    """
    console = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(description, total=1.0)
    appearance = Timer(_PATIENCE_S, bar.start)
    appearance.daemon = True
    if console.is_terminal:
        appearance.start()
    try:
        yield lambda share: bar.update(task, completed=min(1.0, max(0.0, share)))
    finally:
        appearance.cancel()
        if console.is_terminal:
            appearance.join()
            bar.stop()
