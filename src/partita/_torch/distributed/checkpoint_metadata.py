"""The table of contents of a torch.distributed.checkpoint directory, read without running anything.

``.metadata`` is a pickle, and a pickle can call whatever it names. torch writes only a few dataclasses there,
some of them private, and no others are loaded.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from partita.errors import ArgumentTypeError

__all__ = ["read_metadata", "storage_place"]

_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return layout


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA},
    **{
        (module, name): kind  # a pure path touches no file, and can be made on every system
        for module in ("pathlib", "pathlib._local")
        for names, kind in (
            (("PosixPath", "PurePosixPath"), PurePosixPath),
            (("WindowsPath", "PureWindowsPath"), PureWindowsPath),
        )
        for name in names
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that a table of contents is made of")


def read_metadata(stream: BinaryIO) -> Metadata:
    """Read the table from a stream. Only torch's own dataclasses are made, and nothing is called.

    Raises:
        Exception: whatever unpickling raises where the stream is damaged or names something else.
    """
    contents = _MetadataUnpickler(stream).load()
    if not isinstance(contents, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(contents).__name__} and no Metadata")
    return contents


def storage_place(info: Any) -> tuple[str, int, int]:
    """Return where a stored value lies: the file, the offset and the length in bytes.

    Raises:
        ArgumentTypeError: ``info`` is no storage entry.
    """
    if not isinstance(info, filesystem._StorageInfo):
        raise ArgumentTypeError(f"a {type(info).__name__} does not say where a value lies")
    place = (info.relative_path, info.offset, info.length)
    if not (isinstance(place[0], str) and type(place[1]) is int and type(place[2]) is int):
        raise ArgumentTypeError(f"{place!r:.80} is no place in a file")
    return place
