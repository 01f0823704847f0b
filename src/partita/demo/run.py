"""``partita demo`` from start to end: plan, train uncut, train cut, compare, report."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from partita.demo.comparison import Comparison, compare_parameters
from partita.demo.data import read_corpus
from partita.demo.launch import launch
from partita.demo.settings import DemoSettings, check_writable
from partita.demo.summary import build_report, conclude, introduce, write_files
from partita.demo.training import measure_rank, train_rank, train_uncut
from partita.demo.watch import train_and_watch
from partita.planning import Cluster, CostModel, plan_stages
from partita.reporting import LossPoint

__all__ = ["DemoResult", "run_demo"]


@dataclass(frozen=True)
class DemoResult:
    """The comparison of cut and uncut training, and the paths of the files that say so."""

    comparison: Comparison
    losses: tuple[LossPoint, ...]
    files: tuple[Path, ...]


def run_demo(settings: DemoSettings, out: Path, console: Console) -> DemoResult:
    """Train a model cut and uncut, compare both, and write a report.

    Args:
        out: folder for ``report.html``, ``report.json``, ``trace.json`` and ``plan.json``.
        console: where to print.

    Raises:
        UsageError: an option that can't be used, an output folder that can't be written to.
        ExecutionError: a process failed.
    """
    # What can be refused is refused before anything runs.
    check_writable(out)
    settings.check_schedule()
    corpus = read_corpus()
    with tempfile.TemporaryDirectory(prefix="partita-demo-") as scratch, _progress(console) as progress:
        folder = Path(scratch)
        costs, cluster = _measure(settings, progress)
        plan = plan_stages(
            costs,
            settings.number_of_stages,
            cluster=cluster,
            schedule=settings.schedule,
            microbatches=settings.microbatches,
            parameter_copies=4,
        )
        introduce(console, settings, corpus, plan)
        processes = settings.processes
        # The same training twice: uncut on one process, then cut.
        uncut = train_and_watch(
            lambda: launch(train_uncut, 1, settings, scratch, name="uncut training"),
            progress,
            "training uncut, 1 process",
            settings.steps,
            [folder / "uncut.jsonl"],
        )
        cut = train_and_watch(
            lambda: launch(
                train_rank, settings.processes, settings, plan.to_json(), scratch, name="pipeline"
            ),
            progress,
            f"training cut, {processes} processes",
            settings.steps,
            [folder / f"rank{rank}.jsonl" for rank in range(processes)],
            other=uncut,
        )
        # The weights after it, then the page.
        comparison = compare_parameters(
            folder / "uncut.safetensors",
            [folder / f"stage{stage}.safetensors" for stage in range(settings.number_of_stages)],
        )
    report = build_report(settings, corpus, plan, uncut, cut, comparison)
    files = write_files(out, report, plan)
    conclude(console, settings, comparison, report, files)
    return DemoResult(comparison, report.losses, files)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _measure(settings: DemoSettings, progress: Progress) -> tuple[CostModel, Cluster]:
    """The costs and the links, as measured by rank 0 while as many ranks are at work as the machine has
    processors for.
    """
    processes = min(settings.processes, max(os.cpu_count() or 1, 2))
    task = progress.add_task(f"measuring, {processes} processes", total=None)
    measured = launch(measure_rank, processes, settings, name="measurement")
    progress.update(task, total=1, completed=1)
    costs, cluster = measured[0]
    return CostModel.from_json(costs), replace(Cluster.from_json(cluster), ranks=settings.processes)
