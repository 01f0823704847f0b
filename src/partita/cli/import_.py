"""``partita import``: from a folder of safetensors files to a checkpoint that any cut loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options.model_options import Architecture, ConfigJson, ModelType, Overrides
from partita.cli.output.progress import progress_bar
from partita.cli.output.stdout import print_json
from partita.reporting import format_bytes

__all__ = ["import_"]


def import_(
    folder: Annotated[
        Path, typer.Argument(help="What save_pretrained wrote: a folder, an index or a .safetensors file.")
    ],
    checkpoint: Annotated[Path, typer.Argument(help="The new checkpoint.")],
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model, to check names and shapes: hf:TYPE, hf:FOLDER with a config.json, or "
            "FILE.py:NAME."
        ),
    ] = None,
    config_json: ConfigJson = None,
    model_type: ModelType = None,
    set_: Overrides = None,
    architecture: Architecture = None,
    model_key: Annotated[
        str, typer.Option(help="The prefix of the model's names in the checkpoint.")
    ] = "model",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write the tensors of safetensors files as a checkpoint, for load_checkpoint with any number of stages.

    Tensors are copied as they are, one after the other, and get checksums.

    \b
    partita import weights start  # then, on every rank: load_checkpoint("start", stage, cast=True)
    partita import weights start hf:weights  # compared with the model of weights/config.json
    """
    from partita.cli.models.model_source import choose_source
    from partita.pipelining.checkpoints import import_pretrained

    module = None
    if any((model, config_json, model_type, set_, architecture)):
        module = choose_source(model, config_json, model_type, tuple(set_ or ()), architecture).names()
    with progress_bar("importing") as progress:
        imported = import_pretrained(
            folder, checkpoint, module, model_key=model_key, overwrite=overwrite, progress=progress
        )
    if as_json:
        print_json(wrote=str(checkpoint), tensors=imported.tensors, bytes=imported.bytes)
        return
    print(f"wrote {checkpoint}: {imported.tensors} tensors, {format_bytes(imported.bytes)}")
