"""``partita split``: what the stages of a model would be."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.options.model_options import Architecture, ConfigJson, Dtype, ModelType, Overrides, Sequence
from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.progress import progress_bar
from partita.cli.output.stdout import stdout_console
from partita.reporting import StagesReport, render_split_html, split_chart, split_drawing, split_table

__all__ = ["split"]

_META_NOTE = "cut on the meta device: costs are worked out, and the graph was not compared with the model"


def split(
    model: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:NAME, a function that returns (model, args) or (model, args, kwargs); hf:TYPE or "
            "hf:FOLDER with a config.json."
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Into how many stages to cut; the slowest is made as fast as can be.")
    ] = None,
    split_at: Annotated[
        list[str] | None,
        typer.Option(help="In place of it: a module at which a stage begins; can be given again."),
    ] = None,
    meta: Annotated[
        bool | None,
        typer.Option(
            "--meta/--no-meta",
            help="Without memory and without computing anything (default: for Hugging Face models).",
        ),
    ] = None,
    config_json: ConfigJson = None,
    model_type: ModelType = None,
    set_: Overrides = None,
    architecture: Architecture = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a microbatch (default: 1).")] = None,
    sequence: Sequence = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page here too.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the drawing here too.")] = None,
) -> None:
    """Show the stages that a model is cut into: modules, parameters, what crosses each border, what is tied.

    \b
    partita split model.py:build --stages 4  # planned from measured costs
    partita split model.py:build --split-at layers.8 --split-at head --html split.html --svg split.svg
    partita split hf:llama --set num_hidden_layers=32 --stages 8  # on the meta device
    """
    from partita.cli.models.model_source import choose_source
    from partita.cli.options.cut_options import CutRequest
    from partita.cli.pages.split_rows import split_report

    check_outputs({"--html": html, "--svg": svg})
    cut = CutRequest(stages, tuple(split_at or ()))
    options = architecture, batch, sequence, dtype
    source = choose_source(model, config_json, model_type, tuple(set_ or ()), *options)
    on_meta = source.hugging_face is not None if meta is None else meta
    with progress_bar("cutting the model"):
        with redirect_stdout(sys.stderr):  # what the model prints is no part of the answer
            built = source.build("meta" if on_meta else "cpu")
        pipe = cut.cut(built, has_values=not on_meta)
    note = _META_NOTE if on_meta else str(pipe.proof)
    report = split_report(pipe, built, source.title, note)
    written = write_outputs([(html, lambda: render_split_html(report)), (svg, lambda: split_chart(report))])
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(stdout_console(), report)
    for path in written:
        print(f"wrote {path}", file=sys.stderr if as_json else sys.stdout)


def _show(console: Console, report: StagesReport) -> None:
    console.print(split_table(report))
    console.print()
    console.print(split_drawing(report), no_wrap=True, overflow="ellipsis")
    console.print()
    console.print(report.note, style="dim", markup=False, highlight=False, soft_wrap=True)
