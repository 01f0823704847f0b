"""``partita explain``: what would be done with a model, what not, and why."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from partita.cli.options.model_options import Architecture, ConfigJson, Dtype, ModelType, Overrides, Sequence
from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.progress import progress_bar
from partita.errors import UsageError
from partita.reporting import CaptureReport, capture_tables, render_capture_html

if TYPE_CHECKING:
    from partita.cli.models.model_source import ModelSource

__all__ = ["explain"]


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
        int | None, typer.Option(help="Regions with fewer launches are not captured (default: 2).")
    ] = None,
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
    from partita.cli.models.model_source import choose_source
    from partita.cli.pages.capture_rows import capture_report
    from partita.cudagraphs import SavingModel
    from partita.cudagraphs import explain as explain_cudagraphs

    if purpose != "cudagraphs":
        raise UsageError(f"--for is {purpose!r}: there is 'cudagraphs'")
    if min_launches is not None and min_launches < 0:
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
            saving=SavingModel() if min_launches is None else SavingModel(min_launches=min_launches),
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
    import torch

    return source.hugging_face is not None and device.startswith("cuda") and not torch.cuda.is_available()


def _show(report: CaptureReport) -> None:
    console = Console()
    console.print(report.note, style="yellow" if report.assumed else "dim", markup=False, highlight=False)
    for table in capture_tables(report):
        console.print(table)
    if report.stopped:
        console.print("the rest of the model is not here: ", style="bold yellow", end="")
        console.print(report.stopped, markup=False, highlight=False)
    console.print(report.summary, markup=False, highlight=False)
