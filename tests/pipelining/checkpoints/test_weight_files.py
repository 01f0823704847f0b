"""A stage takes its own tensors out of safetensors files, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.pipelining.resuming import stages_of, state_of
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.pretrained.safetensors_files import SafetensorsFiles
from partita.pipelining.checkpoints.weight_files import load_safetensors


def values() -> dict[str, Tensor]:
    """The transformer's state, with the tied weight under one of its names only."""
    state = {name: value.clone() for name, value in state_of(stages_of(1)[0]).items()}
    del state["embedding.weight"]
    return state


def in_shards(state: dict[str, Tensor], folder: Path, shards: int = 3) -> Path:
    """Several files with an index, as model hubs have them."""
    names = sorted(state)
    weight_map = {}
    for shard in range(shards):
        part = names[shard::shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("layout", ["file", "folder", "index", "folder of shards"])
def test_stages_load_from_one_file_or_many(layout: str, tmp_path: Path) -> None:
    state = values()
    path = tmp_path
    if layout in ("file", "folder"):
        save_file(state, tmp_path / "model.safetensors")
        path = tmp_path / "model.safetensors" if layout == "file" else tmp_path
    else:
        index = in_shards(state, tmp_path)
        path = index if layout == "index" else tmp_path
    stages, _ = stages_of(3, seed=5)
    for stage in stages:
        assert load_safetensors(stage, path) == ()
    state["embedding.weight"] = state["head.weight"]
    assert_equal(state_of(stages), state)


def test_only_the_stages_own_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = in_shards(values(), tmp_path)
    stage = stages_of(3, seed=5)[0][1].module
    read: list[str] = []
    original = SafetensorsFiles.read
    monkeypatch.setattr(
        SafetensorsFiles,
        "read",
        lambda self, key, device: (read.append(key), original(self, key, device))[1],
    )
    load_safetensors(stage, index)
    assert sorted(read) == sorted(stage.state_dict())
    assert len(read) < len(values()) / 2


def test_files_that_a_stage_does_not_need_may_be_absent(tmp_path: Path) -> None:
    state = values()
    stage = stages_of(3, seed=5)[0][1].module
    save_file({name: state[name] for name in stage.state_dict()}, tmp_path / "mine.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    places = {
        name: "mine.safetensors" if name in stage.state_dict() else "elsewhere.safetensors" for name in state
    }
    index.write_text(json.dumps({"weight_map": places}))
    load_safetensors(stage, index)
    assert_equal(dict(stage.state_dict()), {name: state[name] for name in stage.state_dict()})


def test_a_prefix_stands_in_front_of_the_names(tmp_path: Path) -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    file = tmp_path / "x.safetensors"
    save_file({f"base.{name}": value for name, value in layer.state_dict().items()}, file)
    with pytest.raises(
        CheckpointError, match=r"does not have 'weight', 'bias': it has 'base.bias', 'base.weight'. P"
    ):
        load_safetensors(other, file)
    load_safetensors(other, file, prefix="base.")
    assert torch.equal(other.weight, layer.weight)


def test_missing_names_may_be_allowed_and_are_told(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    layer = nn.Linear(2, 2)
    bias = layer.bias.detach().clone()
    assert load_safetensors(layer, tmp_path / "x.safetensors", strict=False) == ("bias",)
    assert torch.equal(layer.weight, torch.ones(2, 2))
    assert torch.equal(layer.bias, bias)


def test_another_shape_is_an_error_with_both_before_anything_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(3)}, file)
    layer = nn.Linear(2, 2)
    message = f"'bias' has shape [3] in {str(file)!r}, and [2] in the stage"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_safetensors(layer, file)
    assert not torch.equal(layer.weight, torch.ones(2, 2))


def test_another_dtype_is_an_error_unless_cast(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(2, 2).bfloat16(), "bias": torch.ones(2)}, file)
    layer = nn.Linear(2, 2)
    message = f"'weight' is torch.bfloat16 in {str(file)!r}, and torch.float32 in the stage"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_safetensors(layer, file)
    load_safetensors(layer, file, cast=True)
    assert torch.equal(layer.weight, torch.ones(2, 2))


def test_meta_stages_are_told_to_materialise(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'weight' is on the meta device: materialise the stage first"):
        load_safetensors(nn.Linear(2, 2, device="meta"), tmp_path)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(
        CheckpointError, match=r"has neither model.safetensors.index.json nor model.safetensors"
    ):
        load_safetensors(layer, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"there is no '.*nothing.safetensors': give a safetensors file"
    ):
        load_safetensors(layer, tmp_path / "nothing.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(CheckpointError, match=r"cut.safetensors' can't be read as safetensors"):
        load_safetensors(layer, tmp_path / "cut.safetensors")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"bad.json' is no index of safetensors files \(TypeError"):
        load_safetensors(layer, tmp_path / "bad.json")


def test_an_index_that_does_not_match_its_files_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    index = tmp_path / "i.json"
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"the index says that .*a.safetensors' has 'bias', but it has not"
    ):
        load_safetensors(nn.Linear(2, 2), index)
