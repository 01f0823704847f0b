"""``partita explain``: what would be done with a model, what not, and why."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from partita._torch.compile.graph_breaks import Break
from partita._version import __version__
from partita.cli.models.model_source import ModelSource, choose_source
from partita.cli.options.model_options import Architecture, ConfigJson, Dtype, ModelType, Overrides, Sequence
from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.progress import progress_bar
from partita.cudagraphs import SavingModel
from partita.cudagraphs import explain as explain_cudagraphs
from partita.cudagraphs.explain import ExplainedGraph, Explanation
from partita.cudagraphs.regions import Refusal, Region
from partita.errors import UsageError
from partita.reporting import (
    BreakRow,
    CaptureReport,
    GraphRow,
    LeftOutRow,
    RegionRow,
    capture_tables,
    render_capture_html,
)

__all__ = ["capture_report", "explain"]


def explain(
    model: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:NAME, a function that returns (model, args) or (model, args, kwargs); hf:TYPE or "
            "hf:FOLDER with a config.json."
        ),
    ] = None,
    purpose: Annotated[str, typer.Option("--for", help="What to explain: cudagraphs.")] = "cudagraphs",
    train: Annotated[
        bool, typer.Option("--train", help="Forward and backward of a training step, not inference.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(help="cuda, cuda:1 ... (without a GPU: judged as if there was one), or cpu."),
    ] = "cuda",
    min_launches: Annotated[
        int, typer.Option(help="Regions with fewer launches are not captured.")
    ] = SavingModel.min_launches,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A custom operator, namespace::name, that may be captured; can be given again."),
    ] = None,
    config_json: ConfigJson = None,
    model_type: ModelType = None,
    set_: Overrides = None,
    architecture: Architecture = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a batch (default: 1).")] = None,
    sequence: Sequence = None,
    dtype: Dtype = None,
    html: Annotated[Path | None, typer.Option(help="Write a page here too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what of a model is captured as CUDA graphs, what is not and why, and how many launches it saves.

    \b
    partita explain model.py:build  # inference, judged as if there was a GPU
    partita explain model.py:build --train --html explain.html
    partita explain hf:llama --set num_hidden_layers=4 --sequence 128
    """
    if purpose != "cudagraphs":
        raise UsageError(f"--for is {purpose!r}: there is 'cudagraphs'")
    if min_launches < 0:
        raise UsageError(f"--min-launches is {min_launches}: give 0 or more")
    if any("::" not in name for name in allow or ()):
        raise UsageError(f"--allow is {allow}: write operators as namespace::name")
    check_outputs({"--html": html})
    options = architecture, batch, sequence, dtype
    source = choose_source(model, config_json, model_type, tuple(set_ or ()), *options)
    with progress_bar("tracing the model"), redirect_stdout(sys.stderr):  # what the model prints is no report
        built = source.build("meta" if _is_bare(source, device) else "cpu")
        built.model.train(train)
        explanation = explain_cudagraphs(
            built.model,
            built.args,
            built.kwargs,
            train=train,
            device=device,
            saving=SavingModel(min_launches=min_launches),
            allow=frozenset(allow or ()),
        )
    report = capture_report(explanation, f"{source.title}, {'training' if train else 'inference'}")
    written = write_outputs([(html, lambda: render_capture_html(report))])
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    for path in written:
        print(f"wrote {path}", file=sys.stderr if as_json else sys.stdout)


def _is_bare(source: ModelSource, device: str) -> bool:
    """Whether a Hugging Face model needs no memory: without a GPU nothing is computed."""
    return source.hugging_face is not None and device.startswith("cuda") and not torch.cuda.is_available()


def capture_report(explanation: Explanation, title: str) -> CaptureReport:
    """Turn an explanation into the rows that tables, HTML and JSON show."""
    counts: dict[str, int] = {}
    graphs = []
    for graph in explanation.graphs:
        number = counts.setdefault(graph.kind, 0)
        counts[graph.kind] += 1
        graphs.append(_graph_row(graph, f"{graph.kind} {number}"))
    return CaptureReport(
        title,
        explanation.note,
        explanation.assumed,
        tuple(graphs),
        (
            *(_break_row(item, kept=False) for item in explanation.breaks),
            *(_break_row(item, kept=True) for item in explanation.kept),
        ),
        explanation.stopped,
        {
            "partita": __version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "judged on": f"{explanation.device}{' (assumed)' if explanation.assumed else ''}",
        },
    )


def _break_row(item: Break, *, kept: bool) -> BreakRow:
    return BreakRow(_short(item.source), item.reason, item.hint, kept, item.details)


def _graph_row(graph: ExplainedGraph, name: str) -> GraphRow:
    regions = [_region_row(region, captured=True) for region in graph.plan.regions]
    regions += [_region_row(region, captured=False) for region in graph.plan.too_small]
    return GraphRow(name, graph.nodes, tuple(regions), tuple(_left_out(graph.plan.refusals)))


def _region_row(region: Region, *, captured: bool) -> RegionRow:
    ends = region.nodes[0], region.nodes[-1]
    counts = len(region.nodes), region.launches, region.copies
    return RegionRow(region.key, str(region.device), *counts, region.saved_s, *ends, captured)


def _left_out(refusals: tuple[Refusal, ...]) -> Iterator[LeftOutRow]:
    """One row a line of code; the first operator of a line is the one that matters to the others."""
    lines: dict[str, list[Refusal]] = {}
    for number, refusal in enumerate(refusals):
        lines.setdefault(refusal.source or f"{number}", []).append(refusal)
    for together in lines.values():
        first = together[0]
        operators = tuple(refusal.what for refusal in together)
        yield LeftOutRow(_short(first.source), operators, first.reason, first.way_out)


def _short(source: str) -> str:
    """A file below the current folder by its path from there."""
    return source.removeprefix(f"{Path.cwd()}/")


def _show(report: CaptureReport) -> None:
    console = Console()
    console.print(report.note, style="yellow" if report.assumed else "dim", markup=False, highlight=False)
    for table in capture_tables(report):
        console.print(table)
    if report.stopped:
        console.print("the rest of the model is not here: ", style="bold yellow", end="")
        console.print(report.stopped, markup=False, highlight=False)
    console.print(report.summary, markup=False, highlight=False)
