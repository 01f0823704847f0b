"""The list of a checkpoint's files, and what it says about changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.files.manifest import (
    MANIFEST,
    Manifest,
    checksums,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of 10 bytes, of which 2 to 5 and 5 to 8 are values."""
    (tmp_path / "data").write_bytes(b"0123456789")
    parts = checksums(tmp_path / "data", [(5, 3), (2, 3)])
    write_manifest(tmp_path, Manifest("me", 1.5, 3, {"data": parts}))
    return tmp_path


def _read(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def test_every_byte_of_a_file_has_a_checksum(folder: Path) -> None:
    manifest = _read(folder)
    assert (manifest.identity, manifest.saved_at, manifest.steps) == ("me", 1.5, 3)
    assert [(part.offset, part.length) for part in manifest.files["data"]] == [(0, 2), (2, 3), (5, 3), (8, 2)]
    manifest.check_file(folder, "data")
    for place in range(10):
        (folder / "data").write_bytes(b"0123456789"[:place] + b"x" + b"0123456789"[place + 1 :])
        with pytest.raises(CheckpointError, match=re.escape(f"{str(folder / 'data')!r} is damaged: bytes")):
            manifest.check_file(folder, "data")


def test_another_length_and_a_file_that_is_gone_are_named(folder: Path) -> None:
    (folder / "data").write_bytes(b"012345678")
    with pytest.raises(CheckpointError, match="data' has 9 bytes, and 10 were written: take another"):
        _read(folder).check_file(folder, "data")
    (folder / "data").unlink()
    with pytest.raises(CheckpointError, match="data' can't be read"):
        _read(folder).check_file(folder, "data")


def test_the_list_itself_is_checked(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    for old, new in (("1.5", "1.6"), ('"data"', '"dats"'), ("{", "["), (text, "{}"), (text, "")):
        (folder / MANIFEST).write_text(text.replace(old, new, 1))
        with pytest.raises(CheckpointError, match=r"partita.json' is damaged"):
            read_manifest(folder)
    (folder / MANIFEST).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"partita.json' can't be read"):
        read_manifest(folder)


def test_a_list_of_another_version_is_told_apart_from_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = _read(folder)
    with monkeypatch.context() as patch:
        patch.setattr("partita.pipelining.checkpoints.files.manifest._VERSION", 2)
        write_manifest(folder, manifest)
    assert json.loads((folder / MANIFEST).read_text())["version"] == 2
    with pytest.raises(CheckpointError, match="has version 2, and 1 is what can be read: load it with the"):
        read_manifest(folder)


def test_where_there_is_none_it_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nothing") is None
