"""A folder of safetensors files becomes a checkpoint that any number of stages loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.pipelining.resuming import stages_of, state_of
from tests.pipelining.running import assert_equal
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints import export_pretrained, import_pretrained
from partita.pipelining.checkpoints.together.torch_messages import quiet_alone


@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
@pytest.mark.parametrize("stages", [1, 3])
def test_what_was_exported_comes_back_in_any_cut(stages: int, shard_size: str, tmp_path: Path) -> None:
    parts, _ = stages_of(1, seed=3)
    save_checkpoint(tmp_path / "saved", parts)
    export_pretrained(tmp_path / "saved", tmp_path / "weights", max_shard_size=shard_size)
    shares: list[float] = []
    imported = import_pretrained(tmp_path / "weights", tmp_path / "back", progress=shares.append)
    others, _ = stages_of(stages, seed=5)
    restored = load_checkpoint(tmp_path / "back", others)
    assert restored.missing == ()
    assert restored.steps is None
    assert_equal(state_of(others), state_of(parts))
    state = state_of(parts)
    del state["head.weight"]  # tied, and stored once
    assert imported.tensors == len(state)
    assert imported.bytes == sum(value.nbytes for value in state.values())
    assert shares[-1] == 1.0


def test_a_model_brings_the_other_names_of_tied_weights(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "lm_head": nn.Linear(4, 8, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    save_file({"embed.weight": model["embed"].weight.detach()}, tmp_path / "model.safetensors")
    import_pretrained(tmp_path / "model.safetensors", tmp_path / "back", model)
    state = {"model": {name: torch.zeros(8, 4) for name in model.state_dict()}}
    with quiet_alone():
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "back")
    assert_equal(state["model"], dict(model.state_dict()))


def test_names_and_shapes_are_compared_with_the_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"does not have '0.weight', '0.bias': it has .*from_pretrained"
    ):
        import_pretrained(tmp_path, tmp_path / "back", nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=r"has 'bias', which the model has not"):
        import_pretrained(tmp_path, tmp_path / "back", nn.Linear(2, 2, bias=False))
    with pytest.raises(
        CheckpointError, match=r"'weight' has shape \[2, 2\] in .*, and \[2, 3\] in the model"
    ):
        import_pretrained(tmp_path, tmp_path / "back", nn.Linear(3, 2))
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_that_is_there_is_replaced_only_on_wish(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    save_checkpoint(tmp_path / "back", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"back' exists already: .* or overwrite=True"):
        import_pretrained(tmp_path, tmp_path / "back")
    import_pretrained(tmp_path, tmp_path / "back", overwrite=True)
    layer = nn.Linear(2, 2)
    load_checkpoint(tmp_path / "back", layer)
    assert torch.equal(layer.weight, torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"holds '.*', which an import does not write"):
        import_pretrained(tmp_path, tmp_path, overwrite=True)


def test_a_part_that_is_missing_leaves_nothing(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b.safetensors' can't be read as safetensors"):
        import_pretrained(tmp_path, tmp_path / "back")
    assert not (tmp_path / "back").exists()
