"""Safetensors files of limited size."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pipelining.checkpoints.pretrained.test_export_pretrained import tensors_in
from tests.pipelining.running import assert_equal
from torch import nn

from partita.pipelining import save_checkpoint
from partita.pipelining.checkpoints import export_pretrained


def test_large_models_become_shards_with_an_index(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    save_checkpoint(tmp_path / "saved", model)
    shares: list[float] = []
    exported = export_pretrained(
        tmp_path / "saved", tmp_path / "out", max_shard_size="3 KiB", progress=shares.append
    )
    files = [f"model-{number:05}-of-00006.safetensors" for number in range(1, 7)]
    assert list(exported.files) == files
    assert all((tmp_path / "out" / name).stat().st_size < 3072 + 1024 for name in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == exported.bytes == 12 * (16 * 16 + 16) * 4
    assert set(index["weight_map"]) == set(model.state_dict())
    assert list(index["weight_map"])[-1] == "11.weight"  # in the order of numbers, not of letters
    assert_equal(tensors_in(tmp_path / "out"), dict(model.state_dict()))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", nn.Linear(8, 8))
    exported = export_pretrained(tmp_path / "saved", tmp_path / "out", max_shard_size=40)
    assert len(exported.files) == 2
