"""A folder that appears as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from partita.errors import CheckpointError

__all__ = ["check_replaceable", "new_folder"]


def check_replaceable(path: Path, own: Sequence[str], *, overwrite: bool, what: str) -> None:
    """Refuse a path where something is that may not be replaced. An empty folder may.

    Args:
        own: patterns of names that ``what`` writes, such as ``*.safetensors``: a folder with other files is
            never replaced.
        overwrite: a folder that is there may be replaced.
        what: ``an export`` or ``an import``, for messages.

    Raises:
        CheckpointError: the path can't be used.
    """
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise CheckpointError(f"{str(path)!r} is no folder: give the path of a new one")
    names = sorted(entry.name for entry in path.iterdir())
    if names and not overwrite:
        raise CheckpointError(
            f"{str(path)!r} exists already: give another path, or overwrite=True (--overwrite) to replace it"
        )
    other = next((name for name in names if not any(fnmatchcase(name, pattern) for pattern in own)), None)
    if other is not None:
        raise CheckpointError(
            f"{str(path)!r} holds {other!r}, which {what} does not write: move it, or give another path"
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside ``path`` to write into, which takes its place at the end.

    Where the body raises, what it has written is removed, and what was at ``path`` is still there.

    Raises:
        CheckpointError: the folder can't be made, or something was not written (a full disk).
    """
    final = path.resolve()  # through a link, so that the link stays
    mark = uuid.uuid4().hex[:8]
    draft = final.with_name(f".{final.name}.{mark}.new")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        for file in draft.iterdir():
            _flush(file)
        _replace(final, draft, final.with_name(f".{final.name}.{mark}.old"))
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} can't be written ({error}): give a path on a disk with enough room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace(final: Path, draft: Path, old: Path) -> None:
    if not final.exists():
        draft.rename(final)
        return
    final.rename(old)
    try:
        draft.rename(final)
    except BaseException:
        old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(file: Path) -> None:
    """Wait until the disk has a file, so that no crash leaves an empty one under the final name."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
