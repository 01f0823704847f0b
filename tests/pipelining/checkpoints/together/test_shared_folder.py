"""A directory that only some ranks see is noticed when saving."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.worlds import ProcessWorld
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import save_checkpoint
from partita.pipelining.checkpoints.together import shared_folder
from partita.pipelining.checkpoints.together.savers import savers_of
from partita.runtime import Comm


def _save_at_home(comm: Comm, base: str) -> str:
    shared_folder._PATIENCE_S = 0.0
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(f"{base}/host{comm.rank}/step1", nn.Linear(1, 1), replicas="first")
    return str(caught.value)


def test_each_host_with_a_directory_of_its_own_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Both ranks were told that all is well, and neither's checkpoint could be loaded."""
    for text in ProcessWorld(2).run(_save_at_home, str(tmp_path)):
        assert text.startswith("rank 1 (on ")
        assert "does not see in" in text
        assert text.endswith("Give a directory that all hosts share")
    assert not list(tmp_path.rglob("*.distcp"))


def test_the_mark_is_gone_afterwards(tmp_path: Path) -> None:
    shared_folder.check_shared(tmp_path / "new", savers_of((), None))
    assert list((tmp_path / "new").iterdir()) == []
