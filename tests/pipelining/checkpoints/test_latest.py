"""The newest checkpoint that is whole, the same on every rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.runtime.worlds import ProcessWorld
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.files.manifest import MANIFEST
from partita.pipelining.checkpoints.latest import latest_checkpoint
from partita.runtime import Comm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path / f"step{step}", nn.Linear(2, 2), extra={"step": step})
    return tmp_path


def test_damaged_and_unfinished_ones_are_passed_over(folder: Path) -> None:
    assert latest_checkpoint(folder) == folder / "step10"
    os.truncate(folder / "step10" / "__0_0.distcp", 2000)
    assert latest_checkpoint(folder) == folder / "step2"
    (folder / "step2" / MANIFEST).unlink()
    assert latest_checkpoint(folder) == folder / "step1"
    (folder / "step1" / MANIFEST).write_text("{")
    assert latest_checkpoint(folder) is None


def test_an_empty_folder_has_none_and_a_file_is_an_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nothing") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file' could not be read: NotADirectoryError"):
        latest_checkpoint(tmp_path / "file")


def _go_on(comm: Comm, base: str) -> list[object]:
    """Both save; then rank 1's part of the newest is torn, and one that rank 0 alone can see is the "
    "newest."""
    for step in (2, 4):
        layer = nn.Linear(2, 2)
        layer = nn.Sequential(*[nn.Identity()] * comm.rank, layer)
        save_checkpoint(f"{base}/step{step}", layer, extra={"step": step})
    if comm.rank == 1:
        path = Path(base) / "step4" / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    comm.all_gather_object(None)
    layer = nn.Sequential(*[nn.Identity()] * comm.rank, nn.Linear(2, 2))
    before = [value.clone() for value in layer.parameters()]
    messages = []
    for path in (Path(base) / "step4", Path(base) / f"step{4 - 2 * comm.rank}"):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, layer)
        messages.append(str(caught.value))
    for name in ("step2", "step4"):  # alone, as some rank might do on purpose
        if comm.rank == 0:
            load_checkpoint(Path(base) / name, nn.Sequential(nn.Linear(2, 2)), alone=True)
    same = all(map(torch.equal, before, layer.parameters()))
    latest = latest_checkpoint(base)
    assert latest is not None
    return [same, latest.name, load_checkpoint(latest, layer).extra["step"], *messages]


def test_all_ranks_take_the_same_one_or_none(tmp_path: Path) -> None:
    """Each took the newest that it could read itself: rank 0 went on from step 4 and rank 1 from step 2."""
    results = ProcessWorld(2).run(_go_on, str(tmp_path))
    assert results[0] == results[1]
    same, latest, step, torn, different = results[0]
    assert (same, latest, step) == (True, "step2", 2)
    assert torn.startswith("rank 1: ")
    assert "step4/__1_0.distcp' has " in torn
    assert "rank 0 loads the checkpoint" in different
    assert "and rank 1 another one" in different
