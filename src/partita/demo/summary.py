"""What the demo prints and writes: the plan before, the figures after, and four files."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from partita._version import __version__
from partita.demo.comparison import Comparison
from partita.demo.data import ByteCorpus
from partita.demo.peak_memory import PeakMemory
from partita.demo.settings import DemoSettings
from partita.demo.timelines import traced_timeline
from partita.demo.watch import Side
from partita.planning import Plan, schedule_of, simulate
from partita.reporting import (
    LossPoint,
    RankMemory,
    RunReport,
    chrome_trace,
    format_bytes,
    format_count,
    format_loss,
    format_share,
    key_figures,
    plan_table,
    render_html,
    report_to_json,
    simulation_timeline,
    stage_rows,
)

__all__ = ["build_report", "conclude", "introduce", "write_files"]


def introduce(console: Console, settings: DemoSettings, corpus: ByteCorpus, plan: Plan) -> None:
    """Print the sizes of model and data, and the plan."""
    parameters = sum(stage.parameters for stage in plan.stages)
    console.print(
        f"[bold]partita {__version__}[/] cuts a transformer of about {format_count(parameters)} parameters "
        f"in {settings.number_of_stages} ({settings.kind.name}, {settings.microbatches} microbatches of "
        f"{settings.microbatch} × {settings.model.context} bytes)"
    )
    console.print(
        f"data: {corpus.files[0]} files of Python's standard library, {format_bytes(len(corpus.train))} to "
        f"train on, and {corpus.files[1]} others, {format_bytes(len(corpus.validation))}, to validate"
    )
    console.print(plan_table(stage_rows(plan)))


def build_report(
    settings: DemoSettings, corpus: ByteCorpus, plan: Plan, uncut: Side, cut: Side, comparison: Comparison
) -> RunReport:
    """Put together all that the report shows."""
    simulation = simulate(schedule_of(plan), plan)
    measured = traced_timeline(cut.spans)
    simulated = simulation_timeline(simulation, transfers=True)
    figures = key_figures(
        parameter_difference=comparison.largest,
        bitwise_equal=comparison.bitwise,
        pipelined_samples_s=cut.samples_per_second(settings.batch),
        reference_samples_s=uncut.samples_per_second(settings.batch),
        measured=measured,
        simulated=simulated,
        tokens_a_sample=settings.model.context,
    )
    return RunReport(
        title=f"A transformer in {settings.number_of_stages} stages",
        subtitle=(
            f"partita demo: {settings.steps} steps, {settings.kind.name}, {settings.microbatches} "
            f"microbatches, {settings.processes} processes of one thread"
        ),
        stages=stage_rows(plan),
        losses=_points(cut.losses, uncut.losses),
        measured=replace(measured, title="Measured (last step)"),
        simulated=simulated,
        figures=figures,
        environment=_environment(settings, corpus),
        validation=_points(cut.validation, uncut.validation),
        memory=tuple(
            RankMemory(rank, simulation.peak_bytes[rank], cut.memory[rank], PeakMemory.NOTE)
            for rank in sorted(cut.memory)
        ),
    )


def _points(cut: dict[int, float], uncut: dict[int, float]) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(step, cut[step], uncut[step]) for step in sorted(cut.keys() & uncut.keys()))


def _environment(settings: DemoSettings, corpus: ByteCorpus) -> dict[str, str]:
    return {
        "partita": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "data": f"{corpus.files[0]} + {corpus.files[1]} source files of the standard library",
        **settings.describe(),
    }


def write_files(out: Path, report: RunReport, plan: Plan) -> tuple[Path, ...]:
    """Write the report as a page and as data, the trace and the plan, and return their paths."""
    texts = {
        "report.html": render_html(report),
        "report.json": report_to_json(report),
        "trace.json": chrome_trace([report.measured, report.simulated]),
        "plan.json": plan.to_json(),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return tuple(out / name for name in texts)


def conclude(
    console: Console,
    settings: DemoSettings,
    comparison: Comparison,
    report: RunReport,
    files: tuple[Path, ...],
) -> None:
    """Print the comparison, the speeds, the bubbles and the paths of the files."""
    if comparison.bitwise:
        console.print(
            "[bold green]largest parameter difference: 0.0[/] "
            f"(all bits of {format_count(comparison.compared)} numbers equal)"
        )
    else:
        console.print(
            f"[bold red]largest parameter difference: {comparison.largest:.3g}[/] in {comparison.where}: the "
            "order of floating-point operations differed there; this is a defect, please report it with the "
            "files below"
        )
    speeds = [figure.value for figure in report.figures if figure.unit == "samples/s"]
    cut, uncut = (float(speed) for speed in speeds)
    console.print(
        f"samples/s: cut {cut:.1f}, uncut {uncut:.1f} ({cut / uncut:.2f}×; {settings.processes} processes "
        "against one, one thread each)"
    )
    console.print(
        f"bubble: measured {format_share(report.measured.bubble)}, simulated "
        f"{format_share(report.simulated.bubble)}"
    )
    if report.validation:
        last = report.validation[-1]
        console.print(
            f"validation loss: cut {format_loss(last.pipelined)}, uncut {format_loss(last.reference)}"
        )
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True)
