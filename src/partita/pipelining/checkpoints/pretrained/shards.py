"""Tensors in safetensors files of limited size, with an index where they are several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from partita.errors import ArgumentError, CheckpointError, PlanError
from partita.pipelining.checkpoints.pretrained.safetensors_files import DTYPES, INDEX, SINGLE
from partita.planning.hardware._sizes import read_bytes

__all__ = ["Weight", "shard_bytes", "write_shards"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is to be written.

    Attributes:
        name: in the files.
        place: its name where it is read.
        size: its shape.
        dtype: as it is written.
    """

    name: str
    place: str
    size: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it takes in a file."""
        return self.size.numel() * self.dtype.itemsize


def shard_bytes(size: int | str) -> int:
    """The most bytes of tensors in a file, from text such as ``5GB``.

    Raises:
        ArgumentError: no size, or less than a byte.
    """
    try:
        limit = read_bytes(size, "max_shard_size")
    except PlanError as error:
        raise ArgumentError(str(error)) from error
    if limit < 1:
        raise ArgumentError(f"max_shard_size is {size!r}: give a byte or more, such as 5GB")
    return limit


def write_shards(
    folder: Path,
    weights: Sequence[Weight],
    limit: int,
    read: Callable[[Weight], Tensor],
    progress: Callable[[float], object] | None = None,
) -> tuple[str, ...]:
    """Write weights, one file in memory at a time, under the names that model hubs use.

    Args:
        limit: bytes of tensors in a file; a tensor that is larger has a file of its own.
        read: gives the value of a weight.
        progress: called with the share that is done.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: a dtype that safetensors files don't have, or a file that can't be written.
    """
    for weight in weights:
        if weight.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{weight.place!r} is {weight.dtype}, which safetensors files can't hold: convert it before "
                "saving the checkpoint"
            )
    shards = list(_shards(weights, limit))
    files = [SINGLE] if len(shards) == 1 else [_file_of(number, len(shards)) for number in range(len(shards))]
    total = sum(weight.bytes for weight in weights)
    done = 0
    for file, shard in zip(files, shards, strict=True):
        values = {}
        for weight in shard:
            values[weight.name] = read(weight)
            done += weight.bytes
            if progress is not None:
                progress(done / max(total, 1))
        _write(folder / file, values)
    if len(shards) > 1:
        places = {weight.name: file for file, shard in zip(files, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tuple(files)


def _shards(weights: Sequence[Weight], limit: int) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    size = 0
    for weight in weights:
        if shard and size + weight.bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(weight)
        size += weight.bytes
    yield shard


def _file_of(number: int, shards: int) -> str:
    return f"model-{number + 1:05}-of-{shards:05}.safetensors"


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        save_file(values, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(
            f"{str(path)!r} can't be written ({error}): give a path on a disk with enough room"
        ) from error
