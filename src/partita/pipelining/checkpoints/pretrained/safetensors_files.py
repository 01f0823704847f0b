"""Safetensors files that are being read: one, or several with an index that has the file of each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partita.errors import CheckpointError

__all__ = ["DTYPES", "INDEX", "SINGLE", "SafetensorsFiles"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
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


class SafetensorsFiles:
    """Safetensors files, each opened when it is first needed.

    Args:
        path: a ``.safetensors`` file, an index (``.json``), or a directory with either.
        stack: closes them.

    Attributes:
        path: as text.
        places: the file of each key.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = str(path)
        self._stack = stack
        self._open: dict[tuple[Path, str], Any] = {}
        self.places: Mapping[str, Path] = dict(self._find(path))

    def keys(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.places)

    def _find(self, path: Path) -> Iterator[tuple[str, Path]]:
        if path.is_dir():
            inside = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
            if not inside:
                raise CheckpointError(
                    f"{str(path)!r} has neither {INDEX} nor {SINGLE}: give the path of a file"
                )
            path = inside[0]
        elif not path.exists():
            raise CheckpointError(
                f"there is no {str(path)!r}: give a safetensors file, or a folder with {INDEX} or {SINGLE}"
            )
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

    def describe(self, key: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """Shape and dtype, from the header alone."""
        try:
            header = self._file(self.places[key], "cpu").get_slice(key)
        except SafetensorError as error:
            raise CheckpointError(
                f"the index says that {str(self.places[key])!r} has {key!r}, but it has not: fetch index and "
                "files together"
            ) from error
        name = header.get_dtype()
        return tuple(header.get_shape()), DTYPES.get(name, name)

    def read(self, key: str, device: str = "cpu") -> Tensor:
        try:
            return self._file(self.places[key], device).get_tensor(key)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{key!r} of {str(self.places[key])!r} can't be read: {error}; is the download whole?"
            ) from error
