"""``partita import``, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.test_export import SETTINGS, llama
from tests.pipelining.running import assert_equal
from torch import nn
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import CheckpointError
from partita.pipelining import load_checkpoint


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["import", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_safetensors_file_becomes_a_checkpoint() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    save_file(model.state_dict(), "weights.safetensors")
    assert run("weights.safetensors", "start") == "wrote start: 2 tensors, 288 B\n"
    load_checkpoint("start", other)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointError, match=r"'start' exists already"):
        run("weights.safetensors", "start")
    printed = run("weights.safetensors", "start", "--overwrite", "--model-key", "", "--json")
    assert json.loads(printed) == {"wrote": "start", "tensors": 2, "bytes": 288}
    load_checkpoint("start", other, model_key="")


def test_a_folder_of_save_pretrained_is_compared_with_its_configuration() -> None:
    model, other = llama(), llama().float()
    model.bfloat16().save_pretrained("weights", max_shard_size="4KB")
    run("weights", "start", "hf:weights")
    load_checkpoint("start", other, cast=True)
    assert_equal(dict(other.state_dict()), dict(model.float().state_dict()))
    with pytest.raises(CheckpointError, match=r"does not have 'model.layers.2"):
        run("weights", "other", "--model-type", "llama", *SETTINGS, "--set", "num_hidden_layers=3")
