"""``partita demo`` from start to end: plan, train uncut, train cut, compare, report."""

from __future__ import annotations

import platform
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from partita._version import __version__
from partita.demo.comparison import Comparison, compare_parameters
from partita.demo.data import ByteCorpus, read_corpus
from partita.demo.events import EventReader
from partita.demo.launch import launch
from partita.demo.settings import DemoSettings, check_writable
from partita.demo.timelines import measured_timeline, simulated_timeline
from partita.demo.training import build_model, example, train_rank, train_uncut
from partita.pipelining import get_schedule_class, measure_units
from partita.planning import CostModel, Plan, plan_stages
from partita.reporting import (
    LossPoint,
    RunReport,
    StageRow,
    Timeline,
    chrome_trace,
    format_bytes,
    format_count,
    format_loss,
    format_share,
    key_figures,
    outermost_modules,
    plan_table,
    render_html,
    summarise_modules,
)

__all__ = ["DemoResult", "run_demo"]

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class DemoResult:
    """What the demo found out, and where it wrote it."""

    comparison: Comparison
    losses: tuple[LossPoint, ...]
    files: tuple[Path, ...]


@dataclass
class _Side:
    """One of the two trainings, as its events come in."""

    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "step":
            self.losses[event["step"]], self.seconds[event["step"]] = event["loss"], event["seconds"]
        elif kind == "validation":
            self.validation[event["step"]] = event["loss"]
        elif kind == "span":
            self.spans.append(event)

    def samples_per_second(self, batch: int) -> float:
        """From the median step, the first left out: it warms up."""
        ordered = sorted(seconds for step, seconds in self.seconds.items() if step or len(self.seconds) == 1)
        return batch / ordered[len(ordered) // 2]


def run_demo(settings: DemoSettings, out: Path, console: Console) -> DemoResult:
    """Run the demo.

    Args:
        out: folder for ``report.html``, ``trace.json`` and ``plan.json``.
        console: where to print.

    Raises:
        UsageError: an option that can't be used, an output folder that can't be written to.
        InfeasiblePlan: more stages than the model can be cut into.
        ExecutionError: a process failed.
    """
    check_writable(out)
    get_schedule_class(settings.schedule)
    corpus = read_corpus()
    with tempfile.TemporaryDirectory(prefix="partita-demo-") as scratch, _progress(console) as progress:
        folder = Path(scratch)
        costs = _measure(settings, progress)
        plan = plan_stages(
            costs, settings.stages, schedule=settings.schedule, microbatches=settings.microbatches, parameter_copies=4
        )
        _introduce(console, settings, corpus, plan)
        uncut, cut = _Side(), _Side()
        _train(progress, "training uncut, 1 process", settings, folder / "uncut.jsonl", uncut, None,
               lambda: launch(train_uncut, 1, settings, scratch, name="uncut training"))  # fmt: skip
        _train(progress, f"training cut, {settings.stages} processes", settings, folder, cut, uncut,
               lambda: launch(train_rank, settings.stages, settings, plan.to_json(), scratch, name="pipeline"))  # fmt: skip
        comparison = compare_parameters(
            folder / "uncut.safetensors", [folder / f"rank{rank}.safetensors" for rank in range(settings.stages)]
        )
    report, measured, simulated = _report(settings, corpus, plan, uncut, cut, comparison)
    files = _write(out, report, measured, simulated, plan)
    _conclude(console, settings, comparison, uncut, cut, measured, simulated, files)
    return DemoResult(comparison, report.losses, files)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _measure(settings: DemoSettings, progress: Progress) -> CostModel:
    repeats = 5
    task = progress.add_task("capturing and measuring", total=repeats)
    threads = torch.get_num_threads()
    try:
        model = build_model(settings)
        return measure_units(
            model,
            (example(settings),),
            repeats=repeats,
            progress=lambda share: progress.update(task, completed=round(share * repeats)),
        )
    finally:
        torch.set_num_threads(threads)


def _introduce(console: Console, settings: DemoSettings, corpus: ByteCorpus, plan: Plan) -> None:
    parameters = sum(stage.parameters for stage in plan.stages)
    console.print(
        f"[bold]partita {__version__}[/] cuts a transformer of about {format_count(parameters)} parameters in {settings.stages} "
        f"({settings.schedule}, {settings.microbatches} microbatches of {settings.microbatch} × {settings.model.context} bytes)"
    )
    console.print(
        f"data: {corpus.files[0]} files of Python's standard library, {format_bytes(len(corpus.train))} to train on, and "
        f"{corpus.files[1]} others, {format_bytes(len(corpus.validation))}, to validate"
    )
    console.print(plan_table(_rows(plan)))


def _rows(plan: Plan) -> tuple[StageRow, ...]:
    modules = outermost_modules([stage.modules for stage in plan.stages])
    return tuple(
        StageRow(
            stage=stage.index,
            rank=rank,
            modules=summarise_modules(modules[stage.index]),
            parameters=stage.parameters,
            parameter_bytes=stage.parameter_bytes,
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            send_bytes=stage.send_bytes,
        )
        for stage, rank in zip(plan.stages, plan.placement, strict=True)
    )


def _train(
    progress: Progress, title: str, settings: DemoSettings, source: Path, side: _Side, other: _Side | None, run: Callable[[], Any]
) -> None:
    """Run a training while a thread shows what its processes report. The launcher wants the main thread, for its signals."""
    task = progress.add_task(title, total=settings.steps)
    paths = [source] if source.suffix else [source / f"rank{rank}.jsonl" for rank in range(settings.stages)]
    readers = [EventReader(path) for path in paths]
    done = threading.Event()
    seen: Future[None] = Future()

    def look() -> None:
        shown = 0
        try:
            while True:
                last = done.wait(_LOOK_EVERY_S)
                for reader in readers:
                    for event in reader.new():
                        side.take(event)
                while shown in side.losses:
                    progress.update(task, advance=1)
                    if other is not None:
                        progress.console.print(_loss_line(shown, side, other))
                    shown += 1
                if last:
                    break
            seen.set_result(None)
        except Exception as error:  # shown to the main thread, which raises it
            seen.set_exception(error)

    thread = threading.Thread(target=look, name="partita-demo-progress", daemon=True)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    seen.result()


def _loss_line(step: int, cut: _Side, uncut: _Side) -> str:
    left, right = cut.losses[step], uncut.losses[step]
    verdict = "[green]equal[/]" if left == right else f"[red]differ by {abs(left - right):.3g}[/]"
    return f"step {step:>4}  loss cut {format_loss(left)}  uncut {format_loss(right)}  {verdict}"


def _report(
    settings: DemoSettings, corpus: ByteCorpus, plan: Plan, uncut: _Side, cut: _Side, comparison: Comparison
) -> tuple[RunReport, Timeline, Timeline]:
    measured, (simulated, _) = measured_timeline(cut.spans), simulated_timeline(plan)
    figures = key_figures(
        parameter_difference=comparison.largest,
        bitwise_equal=comparison.bitwise,
        pipelined_samples_s=cut.samples_per_second(settings.batch),
        reference_samples_s=uncut.samples_per_second(settings.batch),
        measured=measured,
        simulated=simulated,
    )
    report = RunReport(
        title=f"A transformer in {settings.stages} stages",
        subtitle=f"partita demo: {settings.steps} steps, {settings.schedule}, {settings.microbatches} microbatches, one thread a process",
        stages=_rows(plan),
        losses=_points(cut.losses, uncut.losses),
        measured=replace(measured, title="Measured (last step)"),
        simulated=simulated,
        figures=figures,
        environment=_environment(settings, corpus),
        validation=_points(cut.validation, uncut.validation),
    )
    return report, measured, simulated


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


def _write(out: Path, report: RunReport, measured: Timeline, simulated: Timeline, plan: Plan) -> tuple[Path, ...]:
    texts = {
        "report.html": render_html(report),
        "trace.json": chrome_trace([measured, simulated]),
        "plan.json": plan.to_json(),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return tuple(out / name for name in texts)


def _conclude(
    console: Console,
    settings: DemoSettings,
    comparison: Comparison,
    uncut: _Side,
    cut: _Side,
    measured: Timeline,
    simulated: Timeline,
    files: tuple[Path, ...],
) -> None:
    if comparison.bitwise:
        console.print(f"[bold green]largest parameter difference: 0.0[/] (all bits of {format_count(comparison.compared)} numbers equal)")
    else:
        console.print(
            f"[bold red]largest parameter difference: {comparison.largest:.3g}[/] in {comparison.where}: the order of floating-point "
            "operations differed there; this is a defect, please report it with the files below"
        )
    speed = cut.samples_per_second(settings.batch), uncut.samples_per_second(settings.batch)
    console.print(
        f"samples/s: cut {speed[0]:.1f}, uncut {speed[1]:.1f} ({speed[0] / speed[1]:.2f}×; {settings.stages} processes against one, "
        "one thread each)"
    )
    console.print(f"bubble: measured {format_share(measured.bubble)}, simulated {format_share(simulated.bubble)}")
    if cut.validation:
        last = max(cut.validation)
        console.print(f"validation loss: cut {format_loss(cut.validation[last])}, uncut {format_loss(uncut.validation[last])}")
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True)
