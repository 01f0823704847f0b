from __future__ import annotations

from typing import Any

import pytest
import torch

from partita.errors import CostlyCut
from partita.pipelining import SplitPoint, pipeline

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
IDS = torch.arange(10).reshape(2, 5)
GPT2_SIZES: dict[str, Any] = {"vocab_size": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}


def llama(**settings: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **SIZES, **settings))


def gpt2(**settings: Any) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **GPT2_SIZES, **settings)
    )


def cut(model: Any, place: str, **options: Any) -> Any:
    spec = {place: SplitPoint.BEGINNING}
    return pipeline(model, (), {"input_ids": IDS, **options}, spec, prove=False, modes="train")


@pytest.mark.parametrize(
    ("make", "place"), [(llama, "model.layers.1"), (gpt2, "transformer.h.1")], ids=["llama", "gpt2"]
)
def test_a_default_configuration_says_that_keys_and_values_travel(make: Any, place: str) -> None:
    # keys and values of one layer, 2 x 5 x 8 floats each
    message = r"returns (cache|past_key_values), .* 640 of [\d,]+ bytes .*use_cache = False"
    with pytest.warns(CostlyCut, match=message):
        pipe = cut(make(), place)
    assert str(pipe.info()).count("only to be returned") == 2
    quiet = cut(make(use_cache=False), place)
    assert "only to be returned" not in str(quiet.info())


def test_an_argument_leaves_them_out_too() -> None:
    pipe = cut(llama(), "model.layers.1", use_cache=False)
    assert not pipe.routes.only_returned


def test_causal_attention_needs_no_mask() -> None:
    pipe = cut(llama(use_cache=False), "model.layers.1")
    attention = [node for node in pipe.whole.graph.nodes if "scaled_dot_product" in str(node.target)]
    # (query, key, value, mask, dropout, is_causal)
    assert [node.args[3:] for node in attention] == [(None, 0.0, True)] * 2 or all(
        node.kwargs.get("is_causal") or node.args[5] for node in attention
    )
    assert not any(value.shape[-2:] == (5, 5) for value in pipe.routes.values.values())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_of_windows_or_of_eager_attention_is_worked_out_by_each_stage(attention: str) -> None:
    config = transformers.MistralConfig(
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=2,
        use_cache=False,
        attn_implementation=attention,
        **SIZES,
    )
    pipe = cut(transformers.MistralForCausalLM(config), "model.layers.1")
    assert not any(value.shape[-2:] == (5, 5) for value in pipe.routes.values.values())
