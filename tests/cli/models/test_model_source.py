"""Wherever a model is taken: what is named is built, on the meta device where that is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.cli.models.model_source import choose_source
from partita.errors import UsageError

MODEL = """
import numpy
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight = nn.Parameter(torch.from_numpy(numpy.ones((4, 4), dtype="float32")))
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.from_numpy(numpy.ones(4, dtype="float32")))

    def forward(self, x):
        return self.last(self.first(x)) * self.scale

def build():
    return Tied(), (torch.ones(2, 4),), {}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:build"


def test_a_function_of_a_file_is_built_with_or_without_memory(place: str) -> None:
    source = choose_source(place)
    assert source.build("cpu").model(torch.ones(2, 4)).shape == (2, 4)
    built = source.build("meta")
    tensors = [*built.model.parameters(), *built.model.buffers(), *built.args]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert built.model.first.weight is built.model.last.weight
    assert len(list(built.model.parameters())) == 3


def test_what_a_hugging_face_model_makes_on_the_cpu_has_no_memory_either() -> None:
    """DiffLlama's lambdas come of torch.normal, which ignores the default device."""
    pytest.importorskip("transformers")
    small = ("num_hidden_layers=1", "hidden_size=32", "intermediate_size=32", "num_attention_heads=4")
    source = choose_source(None, model_type="diffllama", settings=(*small, "num_key_value_heads=2"))
    built = source.build("meta")
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}


def test_options_of_other_models_are_refused(place: str) -> None:
    with pytest.raises(UsageError, match=r"--set is for Hugging Face models, and .*model.py:build is none"):
        choose_source(place, settings=("a=1",))
    with pytest.raises(UsageError, match=r"--batch is for Hugging Face models"):  # it was left out silently
        choose_source(place, batch=0)
    with pytest.raises(UsageError, match="no model is named: give a folder with"):
        choose_source(None)
    with pytest.raises(UsageError, match="hf:llama is given with --config-json or --model-type"):
        choose_source("hf:llama", model_type="gpt2")


def test_a_title_says_what_was_set() -> None:
    assert choose_source("hf:llama", settings=("hidden_size=64",)).title == "llama, hidden_size=64"
