"""A checkpoint in which one stored tensor has several names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["AliasedWriter"]


class AliasedWriter(FileSystemWriter):
    """Writes like torch's own, then lets further names point to bytes that are there already.

    A tied parameter's bytes are stored once, and whoever reads the checkpoint (torch itself too) finds it
    under each of the names that the model's state dict has.

    Args:
        path: a directory.
        aliases: from a further name to the one that is written.
    """

    def __init__(self, path: str | os.PathLike[str], aliases: Mapping[str, str]) -> None:
        super().__init__(path)
        self._aliases = dict(aliases)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, aliases included."""
        written: dict[str, list[WriteResult]] = {}
        for result in (result for part in results for result in part):
            written.setdefault(result.index.fqn, []).append(result)
        further = []
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = _beside(metadata.planner_data[name], alias)
            further += [
                replace(result, index=replace(result.index, fqn=alias)) for result in written.get(name, ())
            ]
        super().finish(metadata, [*results, further])


def _beside(path: tuple[str, ...], alias: str) -> tuple[str, ...]:
    """Where the alias stands in the nested state dict: in the section of what it points to."""
    section = ".".join(path[:-1])
    return (*path[:-1], alias.removeprefix(f"{section}.") if section else alias)
