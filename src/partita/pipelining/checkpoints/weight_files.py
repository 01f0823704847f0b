"""A stage's own tensors from safetensors files, and nothing else of them.

The files' headers say which tensor lies where, so a rank reads as many bytes as its stage has. A model in
several files has an index (``model.safetensors.index.json``), which says in which file each tensor is.
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
class _Found:
    """Where a stage's tensor lies: ``key`` in ``file``."""

    held: StateValue
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

    Each tensor is read on its own, straight to the device that the stage's tensor is on, and copied into it.
    Any of a tied tensor's names will do. Names, shapes and dtypes are all checked before the first one is
    read, and an error after that leaves the stage as it was (for which what it held is kept on the CPU
    meanwhile). The format has no checksums: a file that is too short or has a damaged header is an error,
    other numbers in its data are not seen.

    Args:
        stage: one or several, or a whole model; no meta tensors (see `materialise`).
        path: a ``.safetensors`` file, an index (``.json``), or a directory with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        strict: a tensor that no file has is an error. What the files have beyond it belongs to other stages.
        prefix: what the names in the files have in front of the model's (``"transformer."``).
        cast: convert tensors of another dtype; otherwise they are an error.

    Returns:
        The names that no file has (with ``strict=False``).

    Raises:
        CheckpointError: a name that is missing; another shape or dtype than the stage's, with both; a tensor
            on the meta device; a file that is missing or broken.
    """
    state = [held for module in stage_modules(stage) for held in by_identity(state_of_stage(module))]
    tensors = [held for held in state if not is_opaque(held)]
    for held in tensors:
        if not has_memory(held.value):
            raise CheckpointError(f"{held.names[0]!r} is on the meta device: materialise the stage first")
    with ExitStack() as stack:
        files = _Files(Path(path), stack)
        found, missing = _look_up(tensors, files, prefix)
        if missing and strict:
            raise CheckpointError(
                f"{os.fspath(path)!r} does not have {listed(prefix + name for name in missing)}: it has "
                f"{listed(files.keys(), limit=3)}. Pass the prefix that its names have, or strict=False to "
                "leave them as they are"
            )
        for item in found:
            _check(item, files, cast)
        with unchanged_on_error((), ()) as undo:
            for item in found:
                tensor = item.held.value.detach()
                put([(tensor, files.read(item, str(tensor.device)))], undo)
    return tuple(missing)


def _look_up(tensors: Sequence[StateValue], files: _Files, prefix: str) -> tuple[list[_Found], list[str]]:
    found: list[_Found] = []
    missing: dict[str, None] = {}
    for held in tensors:
        key = next((prefix + name for name in held.names if prefix + name in files.places), None)
        if key is None:
            missing[held.names[0]] = None
        else:
            found.append(_Found(held, key, files.places[key]))
    return found, list(missing)


def _check(item: _Found, files: _Files, cast: bool) -> None:
    shape, dtype = files.describe(item)
    tensor = item.held.value
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
    """Safetensors files, each opened when something in it is wanted.

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

    def describe(self, item: _Found) -> tuple[tuple[int, ...], torch.dtype | str]:
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

    def read(self, item: _Found, device: str) -> Tensor:
        """Read one tensor."""
        try:
            return self._file(item.file, device).get_tensor(item.key)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{item.key!r} of {str(item.file)!r} can't be read: {error}; is the download whole?"
            ) from error
