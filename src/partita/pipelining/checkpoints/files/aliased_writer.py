"""A checkpoint in which a stored tensor may have several names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["AliasedWriter"]


class AliasedWriter(FileSystemWriter):
    """Writes as torch's writer does, and lets further names refer to bytes that are stored already.

    A tied parameter's bytes are stored once, and readers of the checkpoint, torch included, find it under
    each of its names in the model's state dict.

    Args:
        path: a directory.
        aliases: from a further name to the one that is stored.
    """

    def __init__(self, path: str | os.PathLike[str], aliases: Mapping[str, str]) -> None:
        super().__init__(path)
        self._aliases = dict(aliases)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents with the aliases."""
        written: dict[str, list[WriteResult]] = {}
        for result in (result for part in results for result in part):
            written.setdefault(result.index.fqn, []).append(result)
        further = []
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = _path_of_alias(metadata.planner_data[name], alias)
            further += [
                replace(result, index=replace(result.index, fqn=alias)) for result in written.get(name, ())
            ]
        super().finish(metadata, [*results, further])


def _path_of_alias(path: tuple[str, ...], alias: str) -> tuple[str, ...]:
    """The alias's path in the nested state dict: in the section of the name that it refers to."""
    section = ".".join(path[:-1])
    return (*path[:-1], alias.removeprefix(f"{section}.") if section else alias)
