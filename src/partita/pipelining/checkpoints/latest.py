"""The newest checkpoint that every rank can load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.files.manifest import MANIFEST, Manifest, read_manifest
from partita.pipelining.checkpoints.together.savers import Savers, agree, attempt, savers_of

__all__ = ["latest_checkpoint"]


def latest_checkpoint(
    folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None, alone: bool = False
) -> Path | None:
    """Return the newest checkpoint below a folder that is complete on all ranks. Collective where
    ``torch.distributed`` is initialised.

    Each file of a candidate is read and compared with its checksums by one of the ranks that see it; where
    the ranks see different files (hosts with copies of their own), by each of them. A damaged checkpoint is
    skipped, and the one before it is checked.

    Args:
        folder: holds the checkpoints, each in a directory of its own, made by `save_checkpoint` or
            `Snapshots`. Those that torch wrote are skipped: they have no checksums.
        process_group: the default one if not given.
        alone: this process asks, and no other.

    Returns:
        Its path, the same checkpoint on every rank; None where there is none.

    Raises:
        CheckpointError: the folder can't be listed, on some rank.

    >>> import tempfile, torch
    >>> from partita.pipelining import save_checkpoint
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (1, 2):
    ...     save_checkpoint(folder / f"step{step}", torch.nn.Linear(2, 2))
    >>> latest_checkpoint(folder).name
    'step2'
    """
    savers = savers_of((), process_group, alone=alone)
    root = Path(folder)
    seen, problem = attempt(lambda: _finished_checkpoints(root), root, "read")
    agree(savers, problem)
    assert seen is not None
    views = savers.gather({name: candidate.view for name, candidate in seen.items()})
    for name in _newest_first(seen, views):
        if _is_whole(root / name, seen[name].manifest, savers, [view[name] for view in views]):
            return root / name
    return None


@dataclass(frozen=True, slots=True)
class _View:
    """What a rank sees of a checkpoint: its identity, its age, and inode and time of its manifest."""

    identity: str
    saved_at: float
    file: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Candidate:
    manifest: Manifest
    view: _View


def _finished_checkpoints(root: Path) -> dict[str, _Candidate]:
    """Checkpoints that were finished, by the names of their directories."""
    candidates = {}
    for path in sorted(root.iterdir()) if root.exists() else ():
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # damaged
        if manifest is not None:
            status = (path / MANIFEST).stat()
            view = _View(manifest.checksum, manifest.saved_at, (status.st_ino, status.st_mtime_ns))
            candidates[path.name] = _Candidate(manifest, view)
    return candidates


def _newest_first(seen: Mapping[str, _Candidate], views: Sequence[Mapping[str, _View]]) -> list[str]:
    """The names of the checkpoints that all ranks see alike; the same on every rank."""
    common = [
        name
        for name, candidate in seen.items()
        if all(name in view and view[name].identity == candidate.view.identity for view in views)
    ]
    return sorted(common, key=lambda name: (seen[name].view.saved_at, name), reverse=True)


def _is_whole(path: Path, manifest: Manifest, savers: Savers, views: Sequence[_View]) -> bool:
    """Compare all files, between the ranks where they see the same ones. Collective."""
    place, ranks = savers.place, len(views)
    shared = len({view.file for view in views}) == 1
    mine = [
        name for number, name in enumerate(sorted(manifest.files)) if not shared or number % ranks == place
    ]
    is_whole = True
    try:
        for name in mine:
            manifest.check_file(path, name)
    except CheckpointError:
        is_whole = False
    return all(savers.gather(is_whole))
