"""A folder that is there as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipelining.checkpoints.pretrained.test_export_pretrained import tensors_in
from tests.pipelining.running import assert_equal
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining import save_checkpoint
from partita.pipelining.checkpoints import export_pretrained
from partita.pipelining.checkpoints.files.manifest import MANIFEST


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path / "first", first)
    save_checkpoint(tmp_path / "second", second)
    export_pretrained(tmp_path / "first", tmp_path / "out")

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_pretrained(tmp_path / "second", tmp_path / "out", overwrite=True, progress=interrupt)
    assert_equal(tensors_in(tmp_path / "out"), dict(first.state_dict()))
    with pytest.raises(CheckpointError, match=r"out' exists already: .* or overwrite=True"):
        export_pretrained(tmp_path / "second", tmp_path / "out")
    export_pretrained(tmp_path / "second", tmp_path / "out", overwrite=True)
    assert_equal(tensors_in(tmp_path / "out"), dict(second.state_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "second"]


def test_only_what_an_export_writes_is_overwritten(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", nn.Linear(2, 2))
    for place in (tmp_path, tmp_path / "saved"):
        with pytest.raises(CheckpointError, match=r"holds '.*', which an export does not write: move it, or"):
            export_pretrained(tmp_path / "saved", place, overwrite=True)
    assert (tmp_path / "saved" / MANIFEST).exists()
