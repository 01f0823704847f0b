"""From a checkpoint of any cut to a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import ArgumentError, CheckpointError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.checkpoint_source import EXTRA, CheckpointSource, StoredTensor
from partita.pipelining.checkpoints.contents.replicas import under
from partita.pipelining.checkpoints.contents.wrapped_tensors import WRAPPER, is_description
from partita.pipelining.checkpoints.files.manifest_writer import METADATA
from partita.pipelining.checkpoints.latest import latest_checkpoint
from partita.pipelining.checkpoints.pretrained.model_names import match_model
from partita.pipelining.checkpoints.pretrained.new_folder import check_replaceable, new_folder
from partita.pipelining.checkpoints.pretrained.safetensors_files import INDEX
from partita.pipelining.checkpoints.pretrained.shards import Weight, shard_bytes, write_shards
from partita.pipelining.stages.placing.state_of_stage import EXTRA_STATE

__all__ = ["Exported", "export_pretrained"]

_OWN = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "config.json", "generation_config.json")


@dataclass(frozen=True)
class Exported:
    """What `export_pretrained` has written.

    Attributes:
        files: the names of the safetensors files.
        tensors: how many there are, tied ones counted once.
        bytes: of the tensors.
        left_out: names of the model's that are no tensors (modules' extra state).
    """

    files: tuple[str, ...]
    tensors: int
    bytes: int
    left_out: tuple[str, ...]


def export_pretrained(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
    overwrite: bool = False,
    progress: Callable[[float], object] | None = None,
) -> Exported:
    """Write the weights of a checkpoint, whatever the cut and the number of ranks that saved it, as
    safetensors files, which ``from_pretrained`` of transformers and `load_safetensors` read.

    One process does it, alone; the others go on. Tensors are read one after the other, compared with their
    checksums, and at most one file of them is in memory. The folder is there as a whole at the end, or not at
    all. A tied tensor is written once, under the first of its names in the model; without a model, under the
    first in order that is not a head's.

    Args:
        checkpoint: a directory of `save_checkpoint`, `Snapshots` or ``torch.distributed.checkpoint``.
        folder: the new folder; an empty one may be there.
        model: the model that was cut, on any device, ``meta`` too: its names and shapes are compared with the
            checkpoint's. If it has a configuration (a model of transformers), ``config.json`` is written and,
            where the model generates, ``generation_config.json``.
        max_shard_size: of the tensors in a file, in bytes or as text (``5GB``).
        dtype: convert floating-point tensors; otherwise they stay as they were saved.
        model_key: the prefix of the model's names in the checkpoint; empty for none.
        optimizer_key: the prefix of the optimizer's, which are left out.
        overwrite: replace a folder that an export has written.
        progress: called with the share that is done.

    Raises:
        CheckpointError: the checkpoint is damaged, is not the model's or has weights that wrap others, or
            the folder is there already or can't be written.
        ArgumentError: a size or dtype that can't be used.

    >>> import tempfile
    >>> from partita.pipelining import save_checkpoint
    >>> checkpoint, folder = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> save_checkpoint(checkpoint, nn.Linear(2, 2))
    >>> export_pretrained(checkpoint, folder)
    Exported(files=('model.safetensors',), tensors=2, bytes=24, left_out=())
    """
    limit, target = shard_bytes(max_shard_size), Path(folder)
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}: give a floating-point dtype, such as torch.bfloat16")
    check_replaceable(target, _OWN, overwrite=overwrite, what="an export")
    source = _open(Path(checkpoint))
    tensors = _below(model_key, optimizer_key, source.tensors())
    if not tensors:
        raise CheckpointError(_nothing_below(source, model_key, optimizer_key))
    others = _below(model_key, optimizer_key, dict.fromkeys(source.values_without_shape()))
    wrapped = [name.removesuffix(f".{WRAPPER}") for name in others if is_description(name)]
    if wrapped:
        raise CheckpointError(
            f"{listed(wrapped)} of {source.path!r} wrap other tensors (quantised weights do), which the "
            "files have no place for: export a checkpoint of the model before it was quantised, or load this "
            "one and save the model by the library that quantised it"
        )
    names = _by_bytes(tensors) if model is None else _by_model(source, tensors, model, model_key)
    weights = [_weight(name, under(model_key, name), tensors[name], dtype) for name in names]

    def read(weight: Weight) -> Tensor:
        stored = tensors[weight.name]
        wanted = {weight.place: torch.empty(stored.size, dtype=stored.dtype)}
        source.read(wanted)
        return wanted[weight.place].to(weight.dtype)

    with new_folder(target) as draft:
        files = write_shards(draft, weights, limit, read, progress)
        if model is not None:
            _write_config(draft, model, weights)
    left_out = tuple(sorted({_whole_value(name) for name in others}))
    return Exported(files, len(weights), sum(weight.bytes for weight in weights), left_out)


def _open(path: Path) -> CheckpointSource:
    if path.is_dir() and not (path / METADATA).exists():
        newest = latest_checkpoint(path, alone=True)
        if newest is not None:
            raise CheckpointError(
                f"{str(path)!r} holds no checkpoint of its own, but {newest.name!r} in it is one: give "
                f"{str(newest)!r}"
            )
    return CheckpointSource(os.fspath(path))


def _below(key: str, optimizer_key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the model's section, by the model's names."""
    others = tuple(f"{other}." for other in (EXTRA, optimizer_key) if other)
    prefix = under(key, "")
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix) and (key or not name.startswith(others))
    }


def _whole_value(name: str) -> str:
    """Of extra state that is a dictionary, each entry is stored by itself."""
    before, mark, _ = name.partition(EXTRA_STATE)
    return before + mark


def _nothing_below(source: CheckpointSource, key: str, optimizer_key: str) -> str:
    names = sorted(_below("", optimizer_key, source.tensors()))
    if not names:
        return f"the checkpoint {source.path!r} holds no tensors of a model: save one with its stages"
    hint = names[0].partition(".")[0] if names[0].count(".") > 1 else ""
    return (
        f"the checkpoint {source.path!r} has no tensor below {key!r}, but it has {listed(names, limit=3)}: "
        f"pass model_key={hint!r} (--model-key)"
    )


def _by_bytes(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The names to write, in order; of those that share their bytes, one."""
    first: dict[Any, str] = {}
    for name in sorted(tensors, key=lambda name: (_is_head(name), _in_order(name))):
        place = tensors[name].bytes_at
        first.setdefault(place if place and tensors[name].size.numel() else name, name)
    return sorted(first.values(), key=_in_order)


def _is_head(name: str) -> bool:
    return "head" in name.rpartition(".")[0]


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """As people sort: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _by_model(
    source: CheckpointSource, tensors: Mapping[str, StoredTensor], model: nn.Module, key: str
) -> list[str]:
    shapes = {name: stored.size for name, stored in tensors.items()}
    where = f"the checkpoint {source.path!r}"
    matched = match_model(model, shapes, where, lambda missing: source.message(missing, key))
    names = []
    for every in matched:
        first, *others = (name for name in every if name in tensors)
        _check_ties(source, tensors, first, others, key)
        names.append(first)
    return names


def _check_ties(
    source: CheckpointSource, tensors: Mapping[str, StoredTensor], first: str, others: Sequence[str], key: str
) -> None:
    """Raise an error where names of one tensor in the model have values that differ in the checkpoint."""
    for other in others:
        if tensors[other].bytes_at == tensors[first].bytes_at:
            continue
        pair = {
            under(key, name): torch.empty(tensors[name].size, dtype=tensors[name].dtype)
            for name in (first, other)
        }
        source.read(pair)
        one, two = pair.values()
        if one.dtype != two.dtype or not torch.equal(_bits(one), _bits(two)):
            raise CheckpointError(
                f"{first!r} and {other!r} are one tensor in the model, and differ in {source.path!r}: give "
                "the model that was saved, with the same configuration (tie_word_embeddings=False)"
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _weight(name: str, place: str, stored: StoredTensor, dtype: torch.dtype | None) -> Weight:
    converts = dtype is not None and stored.dtype.is_floating_point
    return Weight(name, place, stored.size, dtype if converts and dtype is not None else stored.dtype)


def _write_config(folder: Path, model: Any, weights: Sequence[Weight]) -> None:
    """What ``from_pretrained`` needs beside the weights: the model's class, sizes and dtype."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtype = next((weight.dtype for weight in weights if weight.dtype.is_floating_point), None)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
