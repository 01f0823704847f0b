"""A batch that is generated in several parts, which take turns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig

from partita.errors import ArgumentError
from partita.integrations.generation.program import PreparedGeneration

__all__ = ["BatchPart", "cut_batch", "join", "number_of_rows", "with_own_processors"]

_WITH_STATE = ("logits_processor", "stopping_criteria")
_ROW_FUNCTION = "prefix_allowed_tokens_fn"


@dataclass(frozen=True)
class BatchPart:
    """Some rows of a batch.

    Attributes:
        rows: which ones, of the prompts.
        inputs: int64[rows, length]; None where the options have the prompts.
        options: of ``model.generate``, for these rows.
    """

    rows: slice
    inputs: Tensor | None
    options: dict[str, Any]


def number_of_rows(inputs: Tensor | None, options: Mapping[str, Any]) -> int:
    """Return how many prompts a call of ``generate`` has."""
    tensors = [inputs, options.get("inputs_embeds")]
    return next((len(tensor) for tensor in tensors if isinstance(tensor, Tensor)), 1)


def cut_batch(inputs: Tensor | None, options: Mapping[str, Any], parts: int, batch: int) -> list[BatchPart]:
    """Cut a batch by rows.

    Tensors with a row for each prompt are cut; those that are options of generation (token ids that end a
    sequence) are not, whatever their length. A function that is told the number of its row hears the one in
    the whole batch.
    """
    if parts == 1:
        return [BatchPart(slice(0, batch), inputs, dict(options))]
    settings = GenerationConfig()
    result = []
    for rows in _row_slices(batch, parts):
        part = {
            name: value[rows]
            if isinstance(value, Tensor)
            and value.dim()
            and len(value) == batch
            and not hasattr(settings, name)
            else value
            for name, value in options.items()
        }
        if part.get(_ROW_FUNCTION) is not None:
            first = rows.start * _sequences_a_prompt(options)
            part[_ROW_FUNCTION] = _RowsOfTheBatch(options[_ROW_FUNCTION], first)
        result.append(BatchPart(rows, None if inputs is None else inputs[rows], with_own_processors(part)))
    return result


def with_own_processors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with copies of the caller's processors and criteria, which may keep state.

    Modules that they hold are not copied.

    Raises:
        ArgumentError: one that can't be copied.
    """
    result = dict(options)
    for name in _WITH_STATE:
        if result.get(name):
            result[name] = type(result[name])(_own_copy(name, it) for it in result[name])
    return result


def join(results: Sequence[Tensor], prepared: PreparedGeneration) -> Tensor:
    """Return the sequences of all parts, with padding after those of parts that ended early."""
    pad = prepared.config._pad_token_tensor  # noqa: SLF001 - where generate has put it
    longest = max(result.shape[1] for result in results)
    return torch.cat(
        [
            functional.pad(result, (0, longest - result.shape[1]), value=0 if pad is None else int(pad))
            for result in results
        ]
    )


def _row_slices(batch: int, parts: int) -> Iterator[slice]:
    start = 0
    for part in range(parts):
        stop = start + batch // parts + (part < batch % parts)
        yield slice(start, stop)
        start = stop


def _sequences_a_prompt(options: Mapping[str, Any]) -> int:
    config = options.get("generation_config")
    return options.get("num_return_sequences") or getattr(config, "num_return_sequences", None) or 1


@dataclass(frozen=True)
class _RowsOfTheBatch:
    """A function of a row's number and tokens, for a part of a batch."""

    function: Callable[[int, Tensor], Any]
    first: int

    def __call__(self, row: int, tokens: Tensor) -> Any:
        return self.function(self.first + row, tokens)


def _own_copy(name: str, processor: Any) -> Any:
    attributes = getattr(processor, "__dict__", {}).values()
    shared = {id(value): value for value in attributes if isinstance(value, nn.Module)}
    try:
        return copy.deepcopy(processor, shared)
    except Exception as error:
        raise ArgumentError(
            f"the {type(processor).__name__} in {name} can't be copied ({type(error).__name__}: {error}), "
            "and batches that take turns need one each, since it may keep state: let copy.deepcopy copy it, "
            "or call generate for one batch at a time, without in_flight"
        ) from error
