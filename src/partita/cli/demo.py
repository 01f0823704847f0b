"""``partita demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.demo.run import run_demo
from partita.demo.settings import DemoSettings

__all__ = ["demo"]


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = DemoSettings.steps,
    stages: Annotated[
        int, typer.Option(help="How many stages, each on a process of its own.")
    ] = DemoSettings.stages,
    schedule: Annotated[str, typer.Option(help="1F1B or GPipe.")] = DemoSettings.schedule,
    microbatches: Annotated[
        int, typer.Option(help="Into how many a batch is cut.")
    ] = DemoSettings.microbatches,
    out: Annotated[Path, typer.Option(help="Folder for report.html, trace.json and plan.json.")] = Path(
        "out/demo"
    ),
    seed: Annotated[int, typer.Option(help="Of weights, data order and dropout.")] = DemoSettings.seed,
) -> None:
    """Cut a transformer into stages, train it on several processes and beside it uncut, and compare."""
    settings = DemoSettings(
        steps=steps, stages=stages, schedule=schedule, microbatches=microbatches, seed=seed
    )
    console = Console()
    try:
        result = run_demo(settings, out, console)
    except KeyboardInterrupt:
        console.print("stopped; no process is left")
        raise typer.Exit(130) from None
    if not result.comparison.bitwise:
        raise typer.Exit(1)
