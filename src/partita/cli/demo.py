"""``partita demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.options.schedule_names import complete_schedule
from partita.demo.settings import DemoSettings

__all__ = ["demo"]


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = DemoSettings.steps,
    stages: Annotated[
        int | None, typer.Option(help="How many stages (default: those of two processes).")
    ] = DemoSettings.stages,
    schedule: Annotated[
        str,
        typer.Option(
            help="Any that trains, such as GPipe, Interleaved1F1B, ZBVZeroBubble or DualPipeV.",
            autocompletion=complete_schedule,
        ),
    ] = DemoSettings.schedule,
    microbatches: Annotated[
        int, typer.Option(help="Into how many a batch is cut.")
    ] = DemoSettings.microbatches,
    out: Annotated[Path, typer.Option(help="Folder for report, trace and plan.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Of weights, data order and dropout.")] = DemoSettings.seed,
) -> None:
    """Cut a transformer into stages, train it on several processes and beside it uncut, and compare.

    \b
    partita demo
    partita demo --schedule ZBVZeroBubble --out out/zbv  # two stages on each process
    partita demo --schedule GPipe --stages 3 --microbatches 6 --steps 8
    """
    settings = DemoSettings(
        steps=steps, stages=stages, schedule=schedule, microbatches=microbatches, seed=seed
    )
    settings.check_schedule()
    from partita.demo.run import run_demo  # with torch, which takes seconds

    console = Console()
    try:
        result = run_demo(settings, out, console)
    except KeyboardInterrupt:
        console.print("stopped; no process is left")
        raise typer.Exit(130) from None
    if not result.comparison.bitwise:
        raise typer.Exit(1)
