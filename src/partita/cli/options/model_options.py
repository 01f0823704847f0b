"""Options that say which model of transformers is meant, the same in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Architecture", "ConfigJson", "Dtype", "ModelType", "Overrides", "Sequence"]

ConfigJson = Annotated[Path | None, typer.Option(help="A Hugging Face configuration.")]
ModelType = Annotated[str | None, typer.Option(help="A Hugging Face type, such as llama.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="name=value of the configuration; can be given again.")
]
Architecture = Annotated[str | None, typer.Option(help="A Hugging Face model class.")]
Sequence = Annotated[
    int | None, typer.Option(help="Tokens of a sample (default: what the model takes, at most 4096).")
]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32 (default: the configuration's).")
]
