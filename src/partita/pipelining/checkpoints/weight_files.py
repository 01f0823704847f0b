"""Loads a stage's tensors, and no others, from safetensors files.

The files' headers have the place of each tensor, so a rank reads as many bytes as its stage has. A model in
several files has an index (``model.safetensors.index.json``) with the file of each tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partita._torch.tensors.storage import has_memory
from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.checkpoints.all_or_nothing import put, unchanged_on_error
from partita.pipelining.stages.state_of_stage import (
    Stages,
    StateValue,
    by_identity,
    is_opaque,
    stage_modules,
    state_of_stage,
)

__all__ = ["load_safetensors"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


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
    state = [entry for module in stage_modules(stage) for entry in by_identity(state_of_stage(module))]
    tensors = [entry for entry in state if not is_opaque(entry)]
    for entry in tensors:
        if not has_memory(entry.value):
            raise CheckpointError(f"{entry.names[0]!r} is on the meta device: materialise the stage first")
    with ExitStack() as stack:
        files = _Files(Path(path), stack)
        places, missing = _look_up(tensors, files, prefix)
        if missing and strict:
            raise CheckpointError(
                f"{os.fspath(path)!r} does not have {listed(prefix + name for name in missing)}: it has "
                f"{listed(files.keys(), limit=3)}. Pass the prefix that its names have, or strict=False to "
                "leave them as they are"
            )
        for item in places:
            _check(item, files, cast)
        with unchanged_on_error((), ()) as undo:
            for item in places:
                tensor = item.entry.value.detach()
                put([(tensor, files.read(item, str(tensor.device)))], undo)
    return tuple(missing)


def _look_up(tensors: Sequence[StateValue], files: _Files, prefix: str) -> tuple[list[_Place], list[str]]:
    places: list[_Place] = []
    missing: dict[str, None] = {}
    for entry in tensors:
        key = next((prefix + name for name in entry.names if prefix + name in files.places), None)
        if key is None:
            missing[entry.names[0]] = None
        else:
            places.append(_Place(entry, key, files.places[key]))
    return places, list(missing)


def _check(item: _Place, files: _Files, cast: bool) -> None:
    shape, dtype = files.describe(item)
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


def _weight_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"weight_map is a {type(value).__name__}")
    for key, name in value.items():
        if not isinstance(name, str):
            raise TypeError(f"the file of {key!r:.80} is {name!r:.80}")
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name:
            raise ValueError(f"the file of {key!r:.80} is {name!r:.80}, which is not below the index")
    return value


class _Files:
    """Safetensors files, each opened when it is first needed.

    Attributes:
        places: the file of each key.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[tuple[Path, str], Any] = {}
        self.places: Mapping[str, Path] = dict(self._find(path))

    def keys(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.places)

    def _find(self, path: Path) -> Iterator[tuple[str, Path]]:
        if path.is_dir():
            inside = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
            if not inside:
                raise CheckpointError(
                    f"{str(path)!r} has neither {_INDEX} nor {_SINGLE}: give the path of a file"
                )
            path = inside[0]
        if path.suffix != ".json":
            names = self._file(path, "cpu").keys()
            yield from ((name, path) for name in names)
            return
        try:
            weight_map = _weight_map(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{str(path)!r} is no index of safetensors files ({error!r}): it should be JSON with a "
                "weight_map from names to files"
            ) from error
        yield from ((key, path.parent / name) for key, name in weight_map.items())

    def _file(self, path: Path, device: str) -> Any:
        if (path, device) not in self._open:
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt", device=device))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{str(path)!r} can't be read as safetensors: {error}; is the download whole?"
                ) from error
            self._open[path, device] = opened
        return self._open[path, device]

    def describe(self, item: _Place) -> tuple[tuple[int, ...], torch.dtype | str]:
        """Shape and dtype, from the header alone."""
        try:
            header = self._file(item.file, "cpu").get_slice(item.key)
        except SafetensorError as error:
            raise CheckpointError(
                f"the index says that {str(item.file)!r} has {item.key!r}, but it has not: fetch index and "
                "files together"
            ) from error
        name = header.get_dtype()
        return tuple(header.get_shape()), _DTYPES.get(name, name)

    def read(self, item: _Place, device: str) -> Tensor:
        try:
            return self._file(item.file, device).get_tensor(item.key)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{item.key!r} of {str(item.file)!r} can't be read: {error}; is the download whole?"
            ) from error
