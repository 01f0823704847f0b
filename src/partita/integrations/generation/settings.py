"""What every rank must give a generation alike, in words that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from partita.runtime.same_settings import short_digest

__all__ = ["settings_of"]

_PROMPTS = ("input_ids", "inputs_embeds")


def settings_of(
    arguments: Sequence[tuple[Any, Mapping[str, Any]]], options: Mapping[str, Any], in_flight: int
) -> dict[str, str]:
    """Return the settings of a generation, by name.

    Args:
        arguments: the prompts of each batch and the options that it has of its own.
        options: those of all batches.
        in_flight: how many batches take turns.
    """
    if len(arguments) == 1:
        options = {**options, **arguments[0][1]}
        of_batches = ""
    else:
        of_batches = short_digest(str([_each_in_words(kwargs) for _, kwargs in arguments]), 16)
    prompts = [
        inputs if inputs is not None else next((kwargs[name] for name in _PROMPTS if name in kwargs), None)
        for inputs, kwargs in arguments
    ]
    own = {name: value for name, value in options.items() if name not in (*_PROMPTS, "attention_mask")}
    return {
        "the number of batches": str(len(arguments)),
        "the prompts": _digest(prompts),
        "the attention masks": _digest(
            [{**options, **kwargs}.get("attention_mask") for _, kwargs in arguments]
        ),
        "in_flight": str(in_flight),
        "the batches' own options": of_batches and f"of digest {of_batches}",
        **_each_in_words(own),
    }


def _each_in_words(options: Mapping[str, Any]) -> dict[str, str]:
    """Names and values; None is what an option is that is left out."""
    return {name: _in_words(value) for name, value in sorted(options.items()) if value is not None}


def _in_words(value: Any) -> str:
    """A text that is the same on every rank for the same value; of other objects, their class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Tensor):
        return _digest([value])
    if isinstance(value, GenerationConfig):
        return f"a GenerationConfig {value.to_diff_dict()}"
    if isinstance(value, Mapping):
        return str({_in_words(key): _in_words(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_in_words(item) for item in value])
    return f"a {type(value).__qualname__}"


def _digest(tensors: Sequence[Any]) -> str:
    content = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            content.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    shapes = [tuple(tensor.shape) if isinstance(tensor, Tensor) else None for tensor in tensors]
    return f"of shapes {shapes}, with digest {content.hexdigest()}"
