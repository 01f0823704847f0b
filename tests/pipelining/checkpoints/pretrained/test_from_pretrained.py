"""What is exported is what ``from_pretrained`` reads, for the kinds of models that transformers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.pipelining.running import assert_equal

from partita.pipelining import SplitPoint, load_checkpoint, pipeline, save_checkpoint
from partita.pipelining.checkpoints import export_pretrained, import_pretrained

transformers = pytest.importorskip("transformers")

HEADS = {"num_attention_heads": 2, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
DECODER = HEADS | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", DECODER),
    "llama tied": ("llama", "LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "mistral": ("mistral", "MistralForCausalLM", DECODER),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    ),
    "bert": ("bert", "BertForMaskedLM", HEADS | {"intermediate_size": 32}),
}
REARRANGED = {
    "mixtral": ("mixtral", "MixtralForCausalLM", DECODER | {"num_local_experts": 2}),
}
"""Stored under other names than the modules have, and merged when they are loaded."""


def make(kind: str, device: str = "cpu", **more: Any) -> Any:
    model_type, name, settings = (MODELS | REARRANGED)[kind]
    config = transformers.AutoConfig.for_model(model_type, **settings, **more)
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, name)(config)


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("kind", [*MODELS, *REARRANGED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_pretrained_gives_the_saved_weights(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(kind).to(dtype)
    save_checkpoint(tmp_path / "saved", model)
    export_pretrained(tmp_path / "saved", tmp_path / "out", make(kind, "meta"))
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert_equal(dict(loaded.state_dict()), dict(model.state_dict()))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert (tmp_path / "out" / "generation_config.json").exists() is model.can_generate()


@pytest.mark.parametrize("kind", MODELS)
def test_names_are_those_of_save_pretrained_and_come_back(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    save_checkpoint(tmp_path / "saved", model)
    export_pretrained(tmp_path / "saved", tmp_path / "out", make(kind, "meta"))
    model.save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "out") == names_in(tmp_path / "theirs")
    import_pretrained(tmp_path / "theirs", tmp_path / "back", make(kind, "meta"))
    other = make(kind)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    load_checkpoint(tmp_path / "back", other)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_without_a_model_tied_weights_have_the_embeddings_name(tmp_path: Path) -> None:
    model = make("llama tied")
    save_checkpoint(tmp_path / "saved", model)
    export_pretrained(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    model.config.save_pretrained(tmp_path / "out")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in names_in(tmp_path / "out")
    assert_equal(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["llama tied", pytest.param("gpt2", marks=pytest.mark.dear)])
def test_a_cut_model_goes_there_and_back_in_another_cut(kind: str, tmp_path: Path) -> None:
    model = make(kind, use_cache=False).eval()
    tokens = torch.arange(8).reshape(1, 8) % 32
    layers = "transformer.h.0" if kind == "gpt2" else "model.layers.0"
    pipe = pipeline(model, (), {"input_ids": tokens}, split_spec={layers: SplitPoint.END})
    save_checkpoint(tmp_path / "saved", [pipe.build_stage(index) for index in range(2)])
    export_pretrained(tmp_path / "saved", tmp_path / "out", model, max_shard_size="4KB")
    loaded = type(model).from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    import_pretrained(tmp_path / "out", tmp_path / "back")
    other = pipeline(make(kind, use_cache=False), (), {"input_ids": tokens}, stages=3)
    stages = [other.build_stage(index) for index in range(3)]
    for stage in stages:
        for parameter in stage.module.parameters():
            torch.nn.init.zeros_(parameter)
    load_checkpoint(tmp_path / "back", stages)
    save_checkpoint(tmp_path / "again", stages)
    final = make(kind)
    load_checkpoint(tmp_path / "again", final)
    assert_equal(dict(final.state_dict()), dict(model.state_dict()))


def test_an_import_of_rearranged_weights_says_what_to_do(tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"by from_pretrained and save that: save_checkpoint\(path, model\)"):
        import_pretrained(tmp_path / "theirs", tmp_path / "back", make("mixtral", "meta"))
    save_checkpoint(tmp_path / "back", type(model).from_pretrained(tmp_path / "theirs"))
    other = make("mixtral")
    load_checkpoint(tmp_path / "back", other)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
