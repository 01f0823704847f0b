"""What is stored is compared with the names and shapes of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining import save_checkpoint
from partita.pipelining.checkpoints import export_pretrained


def test_a_model_without_memory_is_compared_by_names_and_shapes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    with torch.device("meta"):
        same = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        wider = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        fewer, more = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3), *same, nn.Linear(2, 2))
        more = nn.Sequential(*same, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"'0.weight' has shape \[3, 2\] in .* and \[4, 2\] in the mo"):
        export_pretrained(tmp_path / "saved", tmp_path / "out", wider)
    with pytest.raises(CheckpointError, match=r"has '1.bias', '1.weight', which the model has not: give"):
        export_pretrained(tmp_path / "saved", tmp_path / "out", fewer)
    with pytest.raises(CheckpointError, match=r"does not have 'model.2.weight', 'model.2.bias': "):
        export_pretrained(tmp_path / "saved", tmp_path / "out", more)
    assert not (tmp_path / "out").exists()
    export_pretrained(tmp_path / "saved", tmp_path / "out", same)
