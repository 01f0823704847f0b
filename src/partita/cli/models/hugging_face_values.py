"""Random tokens, pixels and labels in the place of the zeros that costs are measured with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.cli.models.user_file import Built

__all__ = ["with_random_values"]

_LABEL_KINDS = ("start_positions", "end_positions")


def with_random_values(built: Built, seed: int = 0) -> Built:
    """The same model with other values in its inputs, all of them ones that it takes."""
    generator = torch.Generator().manual_seed(seed)
    kwargs = {
        name: _random(name, value, built, generator) if isinstance(value, Tensor) else value
        for name, value in built.kwargs.items()
    }
    return Built(built.model, built.args, kwargs)


def _random(name: str, value: Tensor, built: Built, generator: torch.Generator) -> Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    return torch.randint(_most(name, value, built), value.shape, generator=generator)


def _most(name: str, value: Tensor, built: Built) -> int:
    """How many values an integer input may have."""
    config: Any = built.model.config
    tokens = built.kwargs.get("input_ids")
    if tokens is not None and name in _LABEL_KINDS:
        return int(tokens.shape[-1])
    if tokens is not None and value.shape == tokens.shape:
        return int(config.get_text_config().vocab_size)
    return int(config.num_labels)
