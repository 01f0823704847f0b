"""The files that a command writes: checked before anything costs time, written at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from partita.errors import UsageError

__all__ = ["check_outputs", "write_outputs"]


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuse a path that can't be a file or be written to, or the same path for two options.

    Args:
        paths: by the option that each was given with.

    Raises:
        UsageError: a folder, a path through a file, one path twice, or a place that may not be written to.
    """
    options: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        other = options.setdefault(path.absolute(), option)
        if other != option:
            raise UsageError(f"{other} and {option} are both {path}: give each a file of its own")
        if path.is_dir():
            raise UsageError(f"{option} is {path}, a folder: give a file")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir():
            raise UsageError(f"{option} is {path}, but {folder} is no folder: give another path")
        place = path if path.exists() else folder
        if not _takes_files(place):
            raise UsageError(f"{option} is {path}, but {place} can't be written to: give another path")


def _takes_files(place: Path) -> bool:
    """Whether a file can be written to, or a new one made in a folder, by trying it: root may do everything
    with ``/proc`` as far as its permissions go, and yet no file can be made there.
    """
    if not os.access(place, os.W_OK):
        return False
    try:
        if place.is_dir():
            with tempfile.TemporaryFile(dir=place):
                pass
        elif place.is_file():  # a pipe would wait for its reader
            with place.open("ab"):
                pass
    except OSError:
        return False
    return True


def write_outputs(texts: Sequence[tuple[Path | None, Callable[[], str]]]) -> tuple[Path, ...]:
    """Write each text to its path as UTF-8, folders made; a path of None is left out. What is interrupted, or
    finds the disk full, leaves the file that was there as it was.

    Returns:
        The paths that were written.

    Raises:
        UsageError: a path that can't be written to.
    """
    written = []
    for path, text in texts:
        if path is None:
            continue
        content = text()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, content)
        except OSError as error:
            raise UsageError(f"{path} can't be written ({error.strerror}): give another path") from error
        written.append(path)
    return tuple(written)


def _write(path: Path, content: str) -> None:
    is_plain_file = not path.is_symlink() and (path.is_file() or not path.exists())
    if not is_plain_file or not os.access(path.parent, os.W_OK):
        path.write_text(content, encoding="utf-8")
        return
    before = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        before.write_text(content, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, before)
        before.replace(path)
    finally:
        before.unlink(missing_ok=True)
