"""A writer of checkpoints that adds a manifest."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from partita._torch.distributed.checkpoint_metadata import storage_place
from partita.pipelining.checkpoints.files.aliased_writer import AliasedWriter
from partita.pipelining.checkpoints.files.manifest import (
    UNFINISHED,
    Manifest,
    Part,
    checksums,
    write_manifest,
)

__all__ = ["PREFIX", "ManifestWriter"]

PREFIX = "partita-"
"""The prefix of the ``save_id`` of a checkpoint that is complete only with its manifest."""

METADATA = ".metadata"


@dataclass(frozen=True)
class _Checked(WriteResult):
    """The result of writing a value, as it is sent to the first rank. The first result of a rank has the
    parts of all its ``files``, the others have none.
    """

    files: Mapping[str, tuple[Part, ...]]


class ManifestWriter(AliasedWriter):
    """Writes as its base does, and last the manifest of what all ranks have written.

    Args:
        path: a directory.
        aliases: from a further name to the one that is stored.
        steps: how many steps the schedule has made.
        done: called on the first rank when all is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        aliases: Mapping[str, str],
        *,
        steps: int | None = None,
        done: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(path, aliases)
        self._identity = f"{PREFIX}{uuid.uuid4().hex}"
        self._steps = steps
        self._done = done

    def storage_meta(self) -> StorageMeta | None:
        """Torch's metadata, with an identity from which a reader knows that there must be a manifest."""
        return replace(super().storage_meta() or StorageMeta(), save_id=self._identity)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and read it back for its checksums."""
        results = super().write_data(plan, planner).wait()
        places: dict[str, list[tuple[int, int]]] = {}
        for result in results:
            name, offset, length = storage_place(result.storage_data)
            places.setdefault(name, []).append((offset, length))
        files = {name: checksums(Path(self.path) / name, ranges) for name, ranges in places.items()}
        checked: Future[list[WriteResult]] = Future()
        checked.set_result(
            [
                _Checked(result.index, result.size_in_bytes, result.storage_data, {} if number else files)
                for number, result in enumerate(results)
            ]
        )
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, and last of all the manifest. Until then a file marks the checkpoint
        as unfinished, so that it may be overwritten.
        """
        note = Path(self.path) / UNFINISHED
        note.touch()
        super().finish(metadata, results)
        files: dict[str, tuple[Part, ...]] = {}
        for result in (result for part in results for result in part):
            if isinstance(result, _Checked):
                files |= result.files
        folder = Path(self.path)
        files[METADATA] = checksums(folder / METADATA, ())
        write_manifest(folder, Manifest(self._identity, time.time(), self._steps, files))
        note.unlink()
        if self._done is not None:
            self._done()
