"""Loads a stage's tensors, and no others, from safetensors files.

The files' headers have the place of each tensor, so a rank reads as many bytes as its stage has. A model in
several files has an index (``model.safetensors.index.json``) with the file of each tensor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from partita._torch.tensors.storage import has_memory
from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.all_or_nothing import put, unchanged_on_error
from partita.pipelining.checkpoints.contents.own_state import loadable_state
from partita.pipelining.checkpoints.pretrained.safetensors_files import SafetensorsFiles
from partita.pipelining.stages.placing.state_of_stage import (
    Stages,
    StateValue,
    is_opaque,
    stage_modules,
)

__all__ = ["load_safetensors"]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a stage's tensor: ``key`` in ``file``."""

    entry: StateValue
    key: str
    file: Path


def load_safetensors(
    stage: Stages,
    path: str | os.PathLike[str],
    strict: bool = True,
    prefix: str = "",
    *,
    cast: bool = False,
) -> tuple[str, ...]:
    """Read a stage's parameters and persistent buffers from a safetensors file, or from several with an
    index.

    Each tensor is read by itself, to the device of the stage's tensor, and copied into it. A tied tensor may
    have any of its names. All names, shapes and dtypes are checked before the first tensor is read, and an
    error after that leaves the stage as it was (its old values are on the CPU meanwhile). The format has no
    checksums: a short file or a damaged header is an error, changed numbers are not noticed.

    Args:
        stage: one or several, or a whole model; no meta tensors (see `materialise`).
        path: a ``.safetensors`` file, an index (``.json``), or a directory with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        strict: a tensor that no file has is an error. Further tensors in the files belong to other stages.
        prefix: what the names in the files have in front of the model's (``"transformer."``).
        cast: convert tensors of another dtype; otherwise they are an error.

    Returns:
        The names that no file has (with ``strict=False``).

    Raises:
        CheckpointError: a missing name, another shape or dtype than the stage's, a tensor on the meta device,
            or a file that is missing or damaged.
    """
    states = [loadable_state(module) for module in stage_modules(stage)]
    tensors = [entry for state in states for entry in state.values if not is_opaque(entry)]
    for entry in tensors:
        if not has_memory(entry.value):
            raise CheckpointError(f"{entry.names[0]!r} is on the meta device: materialise the stage first")
    with ExitStack() as stack:
        files = SafetensorsFiles(Path(path), stack)
        places, missing = _look_up(tensors, files, prefix)
        if missing and strict:
            raise CheckpointError(
                f"{os.fspath(path)!r} does not have {listed(prefix + name for name in missing)}: it has "
                f"{listed(files.keys(), limit=3)}. Pass the prefix that its names have, or strict=False to "
                "leave them as they are"
            )
        for item in places:
            _check(item, files, cast)
        with unchanged_on_error(states, ()) as undo:
            for item in places:
                tensor = item.entry.value.detach()
                put([(tensor, files.read(item.key, str(tensor.device)))], undo)
            for state in states:
                state.put({}, missing=missing, strict=strict)
    return tuple(missing)


def _look_up(
    tensors: Sequence[StateValue], files: SafetensorsFiles, prefix: str
) -> tuple[list[_Place], list[str]]:
    places: list[_Place] = []
    missing: dict[str, None] = {}
    for entry in tensors:
        key = next((prefix + name for name in entry.names if prefix + name in files.places), None)
        if key is None:
            missing[entry.names[0]] = None
        else:
            places.append(_Place(entry, key, files.places[key]))
    return places, list(missing)


def _check(item: _Place, files: SafetensorsFiles, cast: bool) -> None:
    shape, dtype = files.describe(item.key)
    tensor = item.entry.value
    if shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{item.key!r} has shape {list(shape)} in {str(item.file)!r}, and {list(tensor.shape)} in the "
            "stage: load the files of the model that was cut"
        )
    if dtype != tensor.dtype and not cast:
        raise CheckpointError(
            f"{item.key!r} is {dtype} in {str(item.file)!r}, and {tensor.dtype} in the stage: convert the "
            "stage first, or pass cast=True to convert what is read"
        )
