"""What ranks compare before they generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'partita[hf]'")

from transformers import GenerationConfig

from partita.integrations.generation.settings import settings_of

PROMPT = torch.tensor([[5, 6]])


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ({"eos_token_id": [3]}, {"eos_token_id": [4]}, "eos_token_id"),
        ({"eos_token_id": torch.tensor(3)}, {"eos_token_id": torch.tensor(4)}, "eos_token_id"),
        ({"sequence_bias": {(5,): 1.0}}, {"sequence_bias": {(5,): 2.0}}, "sequence_bias"),
        (
            {"generation_config": GenerationConfig(top_k=3)},
            {"generation_config": GenerationConfig(top_k=4)},
            "generation_config",
        ),
        ({"attention_mask": PROMPT}, {"attention_mask": PROMPT + 1}, "the attention masks"),
        ({"input_ids": PROMPT}, {"input_ids": PROMPT + 1}, "the prompts"),
    ],
)
def test_each_option_tells_its_values_apart(one: dict[str, Any], other: dict[str, Any], name: str) -> None:
    first, second, again = (settings_of([(None, kwargs)], {}, 1) for kwargs in (one, other, one))
    assert first == again
    assert {key for key in first if first[key] != second[key]} == {name}


def test_what_is_left_out_is_none_and_batches_have_options_of_their_own() -> None:
    assert settings_of([(PROMPT, {})], {"top_k": None}, 2) == settings_of([(PROMPT, {})], {}, 2)
    one, other = (settings_of([(PROMPT, {}), (PROMPT, {"top_k": k})], {}, 2) for k in (3, 4))
    assert [name for name in one if one[name] != other[name]] == ["the batches' own options"]
