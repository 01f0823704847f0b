"""Hugging Face models from their configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.cli.models.hugging_face import build_hugging_face
from partita.cli.models.hugging_face_config import HuggingFaceModel, parse_settings
from partita.cli.models.user_file import Built
from partita.errors import UsageError

pytest.importorskip("transformers")
LLAMA = (
    "num_hidden_layers=2",
    "hidden_size=16",
    "intermediate_size=32",
    "num_attention_heads=2",
    "num_key_value_heads=1",
    "vocab_size=64",
)
SMALL = ("hidden_size=24", "intermediate_size=32", "vocab_size=64", "max_position_embeddings=8")


def build(device: str = "meta", **options: Any) -> Built:
    return build_hugging_face(HuggingFaceModel(**options), device)


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 16}', encoding="utf-8-sig")
    settings = [*LLAMA[:1], *LLAMA[2:]]
    assert build(config_json=path, settings=settings).model.config.hidden_size == 16


def test_no_part_of_a_model_makes_a_cache_for_generation_unless_it_is_asked_to() -> None:
    """Of a configuration with parts, the text's went on making caches: results of every layer, which were
    planned to be kept and sent to the end.
    """
    text = [f"text_config.{setting}" for setting in (*LLAMA, "head_dim=8", "max_position_embeddings=8")]
    config = build(place="gemma3", settings=text).model.config
    assert config.text_config.use_cache is False
    asked = build(place="gemma3", settings=[*text, "text_config.use_cache=true"]).model.config
    assert asked.text_config.use_cache is True


def test_a_setting_that_only_the_models_own_code_asks_for_may_be_set() -> None:
    settings = (*LLAMA, "num_experts=2", "moe_intermediate_size=8", "head_dim=12")
    built = build(place="qwen3_moe", settings=settings, sequence=8)
    assert built.model.model.layers[0].self_attn.q_proj.out_features == 2 * 12
    with pytest.raises(UsageError, match="--set head_din: the qwen3_moe configuration has no 'head_din'"):
        build(place="qwen3_moe", settings=("head_din=12",))


def test_a_type_and_settings_make_a_model_without_memory_and_with_its_loss() -> None:
    built = build(place="llama", settings=LLAMA, batch=2, sequence=8)
    assert type(built.model).__name__ == "LlamaForCausalLM"
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32
    assert built.kwargs["input_ids"].shape == built.kwargs["labels"].shape == (2, 8)


def test_a_model_of_speech_gets_a_spectrogram_and_what_is_said() -> None:
    """``partita plan hf:whisper`` asked for a function of the user's own."""
    sizes = ("d_model=16", "encoder_layers=1", "decoder_layers=1", "encoder_ffn_dim=16", "decoder_ffn_dim=16")
    sizes += ("encoder_attention_heads=2", "decoder_attention_heads=2", "max_source_positions=6")
    sizes += ("max_target_positions=5", "num_mel_bins=4")
    built = build("cpu", place="whisper", settings=sizes, batch=2)
    assert built.kwargs["input_features"].shape == (2, 4, 12)
    assert built.kwargs["labels"].shape == (2, 5)
    assert built.model(**built.kwargs).loss.isfinite()
    assert build(place="whisper", settings=sizes, sequence=3).kwargs["labels"].shape == (1, 3)
    classes = build(place="whisper", settings=sizes, architecture="WhisperForAudioClassification", batch=2)
    assert classes.kwargs["labels"].shape == (2,)
    with pytest.raises(UsageError, match=r"more than the 5 positions .* or --set max_target_positions=6"):
        build(place="whisper", settings=sizes, sequence=6)


def test_a_local_folder_is_read_and_names_no_code(tmp_path: Path) -> None:
    settings = {
        **parse_settings(LLAMA),
        "model_type": "llama",
        "auto_map": {"AutoConfig": "evil--code.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    for options in ({"place": str(tmp_path)}, {"config_json": tmp_path / "config.json"}):
        built = build(**options, settings=("num_hidden_layers=3",))
        assert len(built.model.model.layers) == 3
        assert next(built.model.parameters()).dtype is torch.float16
        assert not hasattr(built.model.config, "auto_map")
    named = build(
        config_json=tmp_path / "config.json", architecture="LlamaForSequenceClassification", batch=3
    )
    assert named.kwargs["labels"].shape == (3,)


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (
            "t5",
            ("num_layers=1", "d_model=8", "d_ff=8", "vocab_size=64"),
            "T5ForConditionalGeneration",
        ),
        ("bert", ("num_hidden_layers=1", *SMALL), "BertForMaskedLM"),
        ("vit", ("num_hidden_layers=1", "image_size=32", "hidden_size=24"), "ViTForImageClassification"),
        ("gpt2", ("num_hidden_layers=1", "n_embd=24", "vocab_size=64", "n_positions=8"), "GPT2LMHeadModel"),
    ],
)
def test_each_kind_gets_its_inputs_and_labels(kind: str, settings: tuple[str, ...], name: str) -> None:
    built = build("cpu", place=kind, settings=settings, batch=2, sequence=8, dtype="float32")
    assert type(built.model).__name__ == name
    assert torch.isfinite(built.model(**built.kwargs).loss)


def test_a_pair_of_encoders_gets_tokens_and_pixels(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    config = {"model_type": "clip", "text_config": text, "vision_config": vision, "projection_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = build("cpu", place=str(tmp_path), architecture="CLIPModel", batch=2, dtype="float32")
    assert {name: list(value.shape) for name, value in built.kwargs.items() if name != "return_loss"} == {
        "input_ids": [2, 8],
        "pixel_values": [2, 3, 32, 32],
    }
    assert torch.isfinite(built.model(**built.kwargs).loss)


def test_images_are_as_large_as_the_part_of_the_model_that_sees_them_takes(tmp_path: Path) -> None:
    """SAM, whose configuration has the size in its vision part, was given 224 × 224 and not 1024 × 1024."""
    vision = {"image_size": 64, "num_channels": 1, "hidden_size": 16, "num_hidden_layers": 1}
    config = {"model_type": "sam", "architectures": ["SamModel"], "vision_config": vision}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert list(build(config_json=path, batch=2).kwargs["pixel_values"].shape) == [2, 1, 64, 64]


def test_a_model_whose_code_lies_elsewhere_is_named_by_its_architecture(tmp_path: Path) -> None:
    """Kimi K2's configuration brings code of its own, and its architecture is DeepSeek V3's."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}))
    with pytest.raises(
        UsageError, match=r"DeepseekV3ForCausalLM, which is that of --model-type deepseek_v3$"
    ):
        build(config_json=path)


def test_on_the_cpu_it_runs() -> None:
    built = build("cpu", place="llama", settings=LLAMA, sequence=4, dtype="float32")
    assert torch.isfinite(built.model(**built.kwargs).loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place": "meta-llama/Llama-3.1-70B"}, "is no model type and no folder, and nothing is download"),
        ({"place": "arce"}, "is no model type and no folder, .*; near are arcee"),
        ({"model_type": "lama"}, "there is no model type 'lama' in transformers .*near are .*llama"),
        ({"place": "llama", "settings": ("num_hidden_layer=2",)}, "did you mean 'num_hidden_layers'"),
        (
            {"place": "llama", "settings": ("num_hidden_layers",)},
            "write name=value, such as num_hidden_layers",
        ),
        (
            {"place": "llama", "settings": ("num_hidden_layers=-3",)},
            "--set num_hidden_layers is -3: give a number that is not below 0",
        ),
        (
            {"place": "llama", "settings": ("hidden_size=lots",)},
            "llama configuration can't be used|can't be made",
        ),
        ({"place": "llama", "dtype": "int4"}, "--dtype is 'int4': give bfloat16, float16, float32"),
        ({"place": "llama", "batch": 0}, "--batch is 0: give 1 or more"),
        ({"place": "llama", "sequence": 10**6}, "--sequence is 1000000, more than the 2048 positions"),
        ({"place": "llama", "architecture": "os"}, "--architecture is 'os': transformers has no such model"),
        (
            {"place": "whisper", "architecture": "WhisperModel"},
            "WhisperModel takes input_features: write a fu",
        ),
        ({"config_json": Path("nowhere.json")}, r"nowhere.json can't be read \(No such file"),
    ],
)
def test_what_can_not_be_used_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        build(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON"), ("[1]", "holds a list and no configuration"), ("{}", "names no model_type")],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        build(place=str(tmp_path))


def test_a_dotted_name_sets_an_inner_value(tmp_path: Path) -> None:
    built = build(place="llama", settings=(*LLAMA, "rope_parameters.rope_theta=500000.0"), sequence=4)
    assert built.model.config.rope_parameters["rope_theta"] == 500000.0


def test_a_model_that_transformers_can_not_import_is_told_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ModuleNotFoundError("Could not import module") from RuntimeError("operator nms does not exist")

    monkeypatch.setattr("partita.cli.models.hugging_face_config._imported_class", broken)
    with pytest.raises(
        UsageError, match="can't import its model for a LlamaConfig: RuntimeError: operator nms"
    ):
        build(place="llama", settings=LLAMA)
