"""``partita export``: from a checkpoint of any cut to a folder that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options.model_options import Architecture, ConfigJson, ModelType, Overrides
from partita.cli.options.quantities import parse_bytes
from partita.cli.output.progress import progress_bar
from partita.cli.output.stdout import print_json
from partita.errors import UsageError
from partita.listing import listed
from partita.reporting import format_bytes

__all__ = ["export"]


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint of partita's or of torch.distributed.checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model, to check names and shapes and to write its configuration: hf:TYPE, hf:FOLDER "
            "with a config.json, or FILE.py:NAME. Without one, the weights alone are written."
        ),
    ] = None,
    config_json: ConfigJson = None,
    model_type: ModelType = None,
    set_: Overrides = None,
    architecture: Architecture = None,
    max_shard_size: Annotated[str, typer.Option(help="Tensors in a file, at most.")] = "5GB",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32 (default: as they were saved).")
    ] = None,
    model_key: Annotated[
        str, typer.Option(help="The prefix of the model's names in the checkpoint.")
    ] = "model",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an export wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write a checkpoint's weights as safetensors files, and the model's configuration, for from_pretrained.

    The checkpoint may be of any number of stages and ranks. Checksums are compared, and one file of tensors
    is in memory at a time. Nothing is downloaded.

    \b
    partita export runs/step-000001000 out --config-json config.json  # weights and configuration
    partita export runs/step-000001000 out hf:llama --set num_hidden_layers=4 --set hidden_size=256
    partita export runs/step-000001000 out --dtype bfloat16 --max-shard-size 2GB  # the weights alone
    """
    from partita.cli.models.hugging_face_config import DTYPES
    from partita.cli.models.model_source import choose_source
    from partita.pipelining.checkpoints import export_pretrained

    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}: give {', '.join(DTYPES)}")
    limit = parse_bytes(max_shard_size, "--max-shard-size")
    if limit < 1:
        raise UsageError(f"--max-shard-size is {max_shard_size!r}: give a byte or more, such as 5GB")
    module = None
    if any((model, config_json, model_type, set_, architecture)):
        module = choose_source(model, config_json, model_type, tuple(set_ or ()), architecture).names()
    with progress_bar("exporting") as progress:
        exported = export_pretrained(
            checkpoint,
            out,
            module,
            max_shard_size=limit,
            dtype=None if dtype is None else DTYPES[dtype],
            model_key=model_key,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        print_json(
            wrote=str(out),
            files=exported.files,
            tensors=exported.tensors,
            bytes=exported.bytes,
            left_out=exported.left_out,
        )
        return
    if exported.left_out:
        print(f"left out, since it is no tensor: {listed(exported.left_out)}")
    files = len(exported.files)
    print(
        f"wrote {out}: {exported.tensors} tensors, {format_bytes(exported.bytes)} in {files} "
        f"file{'s' if files > 1 else ''}"
    )
