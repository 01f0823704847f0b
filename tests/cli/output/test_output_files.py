"""Paths are checked before anything costs time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from partita.cli.output.output_files import check_outputs, write_outputs
from partita.errors import UsageError


def test_a_check_touches_nothing_and_writing_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    check_outputs({"--csv": path, "--html": None})
    assert not path.parent.exists()
    assert write_outputs([(path, lambda: "µ"), (None, lambda: "never")]) == (path,)
    assert path.read_text(encoding="utf-8") == "µ"


def test_what_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} can't be written"):
        write_outputs([(tmp_path, lambda: "")])
    with pytest.raises(UsageError, match="a folder: give a file"):
        check_outputs({"--html": tmp_path})
    with pytest.raises(UsageError, match="a folder: give a file"):
        check_outputs({"--html": Path("/")})  # which has no folder above it
    with pytest.raises(UsageError, match="--html and --csv are both"):
        check_outputs({"--html": tmp_path / "x", "--csv": tmp_path / "x"})


def test_a_place_that_may_not_be_written_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was said when all was computed. Modes do not bind root, so the system's answer is stood in for.
    monkeypatch.setattr("os.access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(UsageError, match=rf"--svg is .*x.svg, but {tmp_path} can't be written to: give"):
        check_outputs({"--svg": tmp_path / "new" / "x.svg"})
    (tmp_path / "old.svg").touch()
    check_outputs({"--svg": tmp_path / "old.svg"})


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="the system has no /proc")
def test_a_place_that_takes_no_files_whatever_its_permissions_say_is_refused_before_the_work() -> None:
    """As root, ``partita plan --out /proc/x.json`` failed after the search."""
    for path in ("/proc/x.json", "/proc/version"):
        with pytest.raises(UsageError, match=rf"--out is {path}, but /proc.* can't be written to: give ano"):
            check_outputs({"--out": Path(path)})


def test_a_check_leaves_a_file_as_it_is_and_does_not_open_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("plan")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a reader
    for name in ("old.json", "pipe"):
        check_outputs({"--out": tmp_path / name})
    assert (tmp_path / "old.json").read_text() == "plan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "pipe"]


def test_what_is_interrupted_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a plan stood in the place of the one before."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    whole = Path.write_text

    def interrupted(self: Path, text: str, **options: str) -> int:
        whole(self, text[:1], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_outputs([(path, lambda: "new")])
    assert path.read_text() == "old"
    write_outputs([(path, lambda: "new")])
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_outputs([(tmp_path / "link", lambda: "new")])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
