"""A reader of checkpoints that verifies checksums, and runs no code that a checkpoint names."""

from __future__ import annotations

import math
import pickle
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from partita._torch.distributed.checkpoint_metadata import read_metadata, storage_place
from partita.errors import CheckpointError
from partita.pipelining.checkpoints.files.manifest import (
    MANIFEST,
    Manifest,
    Part,
    check_part,
    checksums,
    opened,
    read_manifest,
)
from partita.pipelining.checkpoints.files.manifest_writer import METADATA, PREFIX
from partita.pipelining.checkpoints.files.plain_values import plain_value

__all__ = ["CheckedReader", "PlainPlanner"]


class CheckedReader(FileSystemReader):
    """Reads a checkpoint of partita's or of torch's. The checksums of partita's are verified first.

    Args:
        path: the directory.
        allow_pickle: unpickle what it holds, whatever code that runs.

    Attributes:
        manifest: that of a checkpoint of partita's; None for one of torch's.
        identity: differs between any two checkpoints.

    Raises:
        CheckpointError: it is damaged, was not finished, or names code that is not allowed.
    """

    def __init__(self, path: str, *, allow_pickle: bool = False) -> None:
        super().__init__(path)
        self._folder = Path(path)
        self._allow_pickle = allow_pickle
        self.manifest: Manifest | None = read_manifest(self._folder)
        if self.manifest is not None and METADATA in self.manifest.files:
            self.manifest.check_file(self._folder, METADATA)
        self._contents = self._read_contents()
        self._parts: dict[tuple[str, int, int], Part] = {}
        if self.manifest is not None:
            self.identity = self.manifest.checksum
            self._parts = {
                (name, part.offset, part.length): part
                for name, parts in self.manifest.files.items()
                for part in parts
            }
        else:
            self.identity = checksums(self._folder / METADATA, ())[0].checksum
        self._checked: set[tuple[str, int, int]] = set()

    def _read_contents(self) -> Metadata:
        path = self._folder / METADATA
        try:
            with path.open("rb") as stream:
                contents = pickle.load(stream) if self._allow_pickle else read_metadata(stream)
            _check_contents(contents)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{str(path)!r} is damaged, or is not what torch writes ({error}): take another checkpoint, "
                "or pass allow_pickle=True if you know who wrote it and let it run what it names"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{str(self._folder)!r} holds no checkpoint that can be read ({path.name}: "
                f"{error.strerror or error}): give the directory that one was saved to"
            ) from error
        except Exception as error:  # damaged pickles raise all kinds
            raise CheckpointError(f"{str(path)!r} is damaged ({error!r}): take another checkpoint") from error
        name = getattr(contents.storage_meta, "save_id", None)
        if self.manifest is None and isinstance(name, str) and name.startswith(PREFIX):
            raise CheckpointError(
                f"{str(self._folder)!r} is not whole: {MANIFEST} is missing, which is written last; take "
                "another checkpoint (latest_checkpoint finds one that is whole)"
            )
        if self.manifest is not None and name != self.manifest.identity:
            raise CheckpointError(
                f"{str(path)!r} and {MANIFEST} are of two checkpoints: take another checkpoint, or copy this "
                "one again"
            )
        return contents

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The table of contents."""
        return self._contents

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify all that the plan needs, then read it."""
        if self.manifest is not None:
            for item in plan.items:
                self._check(item)
        return super().read_data(plan, planner)

    def _check(self, item: ReadItem) -> None:
        place = storage_place(self.storage_data[item.storage_index])
        if place in self._checked:
            return
        name, offset, _ = place
        path = self._folder / name
        part = self._parts.get(place)
        if part is None:
            raise CheckpointError(
                f"{str(path)!r} should hold {item.storage_index.fqn!r} at {offset}, of which {MANIFEST} does "
                "not know: take another checkpoint"
            )
        assert self.manifest is not None
        with opened(path) as stream:
            self.manifest.check_size(stream, path, name)
            check_part(stream, path, part, repr(item.storage_index.fqn))
        self._checked.add(place)


class PlainPlanner(DefaultLoadPlanner):
    """Reads values that are no tensors as plain data.

    Args:
        path: the directory, for messages.
        allow_pickle: unpickle anything.
    """

    def __init__(self, path: str, *, allow_pickle: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path
        self._allow_pickle = allow_pickle

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Store a value in the state dict that is loaded."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = plain_value(
            value, f"{name!r} of {self._path!r}", allow_pickle=self._allow_pickle
        )


def _check_contents(contents: Metadata) -> None:
    """Raise TypeError or ValueError where a damaged pickle has put other types into torch's dataclasses."""
    if not isinstance(contents.state_dict_metadata, dict) or not isinstance(contents.storage_data, dict):
        raise TypeError("it has no tables of names and places")
    for name, value in contents.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(value, (TensorStorageMetadata, BytesStorageMetadata)):
            raise TypeError(f"{name!r:.80} is no name of a stored value")
        if isinstance(value, TensorStorageMetadata):
            _check_tensor(name, value)
    for index, info in contents.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
            raise TypeError(f"{index!r:.80} is no name of a stored value")
        file, offset, length = storage_place(info)
        path = PurePosixPath(file)
        if offset < 0 or length < 0 or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{index.fqn!r:.80} lies outside of the directory, in {file!r:.80}")


def _check_tensor(name: str, value: TensorStorageMetadata) -> None:
    if not isinstance(value.properties.dtype, torch.dtype) or not _is_size(value.size):
        raise TypeError(f"{name!r:.80} has no shape and dtype")
    stored = 0
    for chunk in value.chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or not (
            _is_size(chunk.offsets) and _is_size(chunk.sizes)
        ):
            raise TypeError(f"{name!r:.80} has a shard without a shape")
        ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, value.size, strict=True)):
            raise ValueError(f"{name!r:.80} has a shard that reaches out of it")
        stored += math.prod(chunk.sizes)
    if stored < math.prod(value.size):  # `numel` would overflow
        raise ValueError(
            f"{name!r:.80} has shards of {stored} elements, which is not all of {list(value.size)}"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(size >= 0 for size in value)
