"""A checkpoint of any cut becomes a folder of safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.pipelining.resuming import stages_of, state_of
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita.errors import ArgumentError, CheckpointError
from partita.pipelining import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints import export_pretrained, load_safetensors
from partita.pipelining.checkpoints.together.torch_messages import quiet_alone


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "lm_head": nn.Linear(4, 8, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_folder_is_the_same_whatever_the_cut(stages: int, tmp_path: Path) -> None:
    whole, _ = stages_of(1, seed=3)
    save_checkpoint(tmp_path / "whole", whole)
    parts, optimizers = stages_of(stages)
    load_checkpoint(tmp_path / "whole", parts)
    save_checkpoint(tmp_path / "saved", parts, optimizers, extra={"epoch": 1})
    exported = export_pretrained(tmp_path / "saved", tmp_path / "out")
    state = state_of(parts)
    expected = {name: value for name, value in state.items() if name != "head.weight"}
    assert_equal(tensors_in(tmp_path / "out"), expected)
    assert exported.files == ("model.safetensors",)
    assert exported.tensors == len(expected)
    assert exported.bytes == sum(value.nbytes for value in expected.values())
    assert exported.left_out == ()
    other, _ = stages_of(2, seed=5)
    load_safetensors(other, tmp_path / "out")
    assert_equal(state_of(other), state)


def test_dtypes_are_kept_or_cast_where_they_are_floating_point(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(4)
    save_checkpoint(tmp_path / "saved", model)
    export_pretrained(tmp_path / "saved", tmp_path / "kept")
    assert_equal(tensors_in(tmp_path / "kept"), dict(model.state_dict()))
    export_pretrained(tmp_path / "saved", tmp_path / "cast", dtype=torch.bfloat16)
    cast = tensors_in(tmp_path / "cast")
    assert {name: value.dtype for name, value in cast.items()} == {
        name: torch.int64 if name == "num_batches_tracked" else torch.bfloat16 for name in model.state_dict()
    }
    with pytest.raises(ArgumentError, match=r"dtype is torch.int8: give a floating-point dtype"):
        export_pretrained(tmp_path / "saved", tmp_path / "int", dtype=torch.int8)


@pytest.mark.parametrize("with_model", [False, True])
def test_tied_weights_are_written_once_under_the_embeddings_name(with_model: bool, tmp_path: Path) -> None:
    model = tied()
    save_checkpoint(tmp_path / "saved", model)
    export_pretrained(tmp_path / "saved", tmp_path / "out", model if with_model else None)
    assert list(tensors_in(tmp_path / "out")) == ["embed.weight"]


def test_weights_that_torch_saved_twice_are_written_once(tmp_path: Path) -> None:
    model = tied()
    with quiet_alone():
        torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    export_pretrained(tmp_path / "saved", tmp_path / "out", model)
    assert list(tensors_in(tmp_path / "out")) == ["embed.weight"]


def test_weights_that_are_tied_in_the_model_alone_must_be_equal(tmp_path: Path) -> None:
    untied = nn.ModuleDict({"embed": nn.Embedding(8, 4), "lm_head": nn.Linear(4, 8, bias=False)})
    save_checkpoint(tmp_path / "saved", untied)
    with pytest.raises(
        CheckpointError, match=r"'embed.weight' and 'lm_head.weight' are one .* differ .*: give the model"
    ):
        export_pretrained(tmp_path / "saved", tmp_path / "out", tied())


def test_another_section_is_named_with_its_key(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "saved", model, optimizer, model_key="", extra={"epoch": 1})
    with pytest.raises(
        CheckpointError, match=r"has no tensor below 'model', but it has '.*': pass model_key"
    ):
        export_pretrained(tmp_path / "saved", tmp_path / "out")
    export_pretrained(tmp_path / "saved", tmp_path / "out", model_key="")
    assert_equal(tensors_in(tmp_path / "out"), dict(model.state_dict()))


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None: ...


def test_what_is_no_tensor_is_left_out_and_named(tmp_path: Path) -> None:
    model = nn.Sequential(WithExtraState(2, 2))
    save_checkpoint(tmp_path / "saved", model)
    for out, given in (("bare", None), ("with_model", model)):
        exported = export_pretrained(tmp_path / "saved", tmp_path / out, given)
        assert exported.left_out == ("0._extra_state",)
        assert list(tensors_in(tmp_path / out)) == ["0.bias", "0.weight"]


def test_damage_is_found_while_reading_and_nothing_is_left(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    (data,) = (tmp_path / "saved").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[-3000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: 'model.1.weight' has another checksum"):
        export_pretrained(tmp_path / "saved", tmp_path / "out", max_shard_size=2000)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_folder_of_snapshots_says_which_is_the_newest(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "steps" / "step-2", nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint.* but 'step-2' in it is one: give .*step-2'"
    ):
        export_pretrained(tmp_path / "steps", tmp_path / "out")
