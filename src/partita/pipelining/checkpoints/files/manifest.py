"""The manifest of a checkpoint: a file that lists all others, with checksums of all their bytes.

``partita.json`` is written last, so a directory without it was not finished. Each stored value (a tensor, or
a shard of one) has a checksum of its own, so that a rank can verify the parts that it reads, and so have the
bytes between them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from partita.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "UNFINISHED",
    "Manifest",
    "Part",
    "check_part",
    "checksums",
    "opened",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "partita.json"
UNFINISHED = "partita.unfinished"
"""A file that exists while the last files of a checkpoint are written."""

_FORMAT, _VERSION = "partita.checkpoint", 1
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes in a file, with their SHA-256 in hexadecimal digits."""

    offset: int
    length: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        identity: a name that no other checkpoint has.
        saved_at: seconds since 1970, by the clock of the first rank.
        steps: how many steps the schedule had made; None where no stage was saved.
        files: the parts of each file in the directory but the manifest, in order and without gaps.
    """

    identity: str
    saved_at: float
    steps: int | None
    files: Mapping[str, tuple[Part, ...]]

    @property
    def checksum(self) -> str:
        """The checksum of the manifest itself."""
        return _digest(self._body())

    def _body(self) -> dict[str, Any]:
        files = {
            name: [[part.offset, part.length, part.checksum] for part in parts]
            for name, parts in self.files.items()
        }
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "identity": self.identity,
            "saved_at": self.saved_at,
            "steps": self.steps,
            "files": files,
        }

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({**self._body(), "checksum": self.checksum}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Read what `to_json` wrote.

        Args:
            path: of the file, for messages.

        Raises:
            CheckpointError: anything else.
        """
        try:
            body = json.loads(text)
            checksum, version = body.pop("checksum"), body["version"]
            is_right = _digest(body) == checksum and body["format"] == _FORMAT
            files = {name: tuple(Part(*part) for part in parts) for name, parts in body["files"].items()}
            manifest = cls(body["identity"], body["saved_at"], body["steps"], files)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{str(path)!r} is damaged ({error!r}): take another checkpoint") from error
        if not is_right:
            raise CheckpointError(
                f"{str(path)!r} is damaged (its checksum is another one): take another checkpoint"
            )
        if version != _VERSION:
            raise CheckpointError(
                f"{str(path)!r} has version {version!r}, and {_VERSION} is what can be read: load it with "
                "the partita that wrote it"
            )
        return manifest

    def check_file(self, folder: Path, name: str) -> None:
        """Verify a whole file.

        Raises:
            CheckpointError: it is missing, or has other bytes than were written.
        """
        path = folder / name
        with opened(path) as stream:
            self.check_size(stream, path, name)
            for part in self.files[name]:
                check_part(stream, path, part, f"bytes {part.offset} to {part.offset + part.length}")

    def check_size(self, stream: BinaryIO, path: Path, name: str) -> None:
        """Verify the length of an open file.

        Raises:
            CheckpointError: it is another one.
        """
        size = os.fstat(stream.fileno()).st_size
        expected = sum(part.length for part in self.files[name])
        if size != expected:
            raise CheckpointError(
                f"{str(path)!r} has {size} bytes, and {expected} were written: take another checkpoint"
            )


def opened(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        CheckpointError: it can't be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} can't be read ({error}): take another checkpoint") from error


def check_part(stream: BinaryIO, path: Path, part: Part, what: str) -> None:
    """Verify a part of a file.

    Args:
        what: the contents of the part, for the message.

    Raises:
        CheckpointError: it has other bytes, or fewer.
    """
    try:
        checksum = _checksum(stream, part.offset, part.length)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} can't be read ({error}): take another checkpoint") from error
    if checksum != part.checksum:
        raise CheckpointError(
            f"{str(path)!r} is damaged: {what} has another checksum than when it was written; take another "
            "checkpoint (latest_checkpoint finds one that is whole)"
        )


def checksums(path: Path, places: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
    """The parts of a file: those at the places (offset and length), and those between them."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        return tuple(
            Part(offset, length, _checksum(stream, offset, length))
            for offset, length in _without_gaps(sorted(set(places)), size)
        )


def _without_gaps(places: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    at = 0
    for offset, length in places:
        if offset > at:
            yield at, offset - at
        yield offset, length
        at = offset + length
    if at < size:
        yield at, size - at


def _checksum(stream: BinaryIO, offset: int, length: int) -> str:
    digest = hashlib.sha256()
    stream.seek(offset)
    while length and (block := stream.read(min(length, _BLOCK))):
        digest.update(block)
        length -= len(block)
    return digest.hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where torch wrote it, or it was not finished.

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} can't be read ({error}): take another checkpoint") from error
    return Manifest.from_json(text, path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, atomically."""
    path, before = folder / MANIFEST, folder / f"{MANIFEST}.tmp"
    with before.open("w", encoding="utf-8") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    before.replace(path)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
