"""``partita export``, as it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.pipelining.running import assert_equal
from torch import nn
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import CheckpointError, UsageError
from partita.pipelining import save_checkpoint

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}
SETTINGS = [part for name, value in SMALL.items() for part in ("--set", f"{name}={json.dumps(value)}")]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["export", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def test_weights_alone_are_written_in_shards() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    save_checkpoint("saved", model)
    assert run("saved", "out", "--max-shard-size", "300B") == "wrote out: 4 tensors, 576 B in 2 files\n"
    printed = json.loads(run("saved", "out", "--max-shard-size", "300B", "--overwrite", "--json"))
    assert sorted(Path("out").glob("*.safetensors")) == [Path("out", name) for name in printed.pop("files")]
    assert printed == {"wrote": "out", "tensors": 4, "bytes": 576, "left_out": []}
    state = {
        name: value for file in Path("out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert_equal(state, dict(model.state_dict()))
    assert not Path("out/config.json").exists()


@pytest.mark.parametrize("way", ["--config-json", "hf:FOLDER", "hf:TYPE", "--model-type"])
def test_with_a_configuration_the_folder_loads_by_from_pretrained(way: str) -> None:
    model = llama()
    save_checkpoint("saved", model)
    Path("conf").mkdir()
    model.config.save_pretrained("conf")
    options = {
        "--config-json": ["--config-json", "conf/config.json"],
        "hf:FOLDER": ["hf:conf"],
        "hf:TYPE": ["hf:llama", *SETTINGS],
        "--model-type": ["--model-type", "llama", *SETTINGS],
    }[way]
    run("saved", "out", *options, "--dtype", "bfloat16")
    loaded, info = type(model).from_pretrained("out", output_loading_info=True)
    assert not any(info.values())
    assert_equal(dict(loaded.state_dict()), dict(model.bfloat16().state_dict()))
    assert loaded.config.use_cache  # a setting for training is not written


def test_the_generation_config_beside_the_configuration_is_kept() -> None:
    model = llama()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained("conf")
    save_checkpoint("saved", model)
    run("saved", "out", "--config-json", "conf/config.json")
    assert json.loads(Path("out/generation_config.json").read_text())["max_new_tokens"] == 7


def test_a_model_of_a_users_file_is_compared() -> None:
    save_checkpoint("saved", nn.Linear(8, 8))
    Path("model.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(8, 4), (torch.ones(1, 8),)\n"
    )
    with pytest.raises(CheckpointError, match=r"'weight' has shape \[8, 8\] in .* and \[4, 8\] in the model"):
        run("saved", "out", "model.py:build")


def test_what_can_not_be_used_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match=r"--dtype is 'int8': give bfloat16, float16, float32"):
        run("nowhere", "out", "--dtype", "int8")
    with pytest.raises(UsageError, match=r"--max-shard-size is '0': give a byte or more, such as 5GB"):
        run("nowhere", "out", "--max-shard-size", "0")
    with pytest.raises(UsageError, match=r"no model is named"):
        run("nowhere", "out", "--set", "a=1")
    with pytest.raises(CheckpointError, match=r"'nowhere' holds no checkpoint that can be read"):
        run("nowhere", "out")


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> str:
        return "seen"


def test_what_is_left_out_and_what_is_replaced_is_said() -> None:
    save_checkpoint("saved", WithExtraState(2, 2))
    assert run("saved", "out").startswith("left out, since it is no tensor: '_extra_state'\nwrote out: 2 ")
    with pytest.raises(CheckpointError, match=r"'out' exists already: .*overwrite"):
        run("saved", "out")
    run("saved", "out", "--overwrite")
