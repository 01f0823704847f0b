"""Models of transformers are cut between their layers, or refused with what to do."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.integrations.generation.generation_models import LLAMA, model
from torch import nn

from partita.errors import ArgumentError, NotSupported
from partita.integrations.generation import cut_for_generation


def test_the_cut_lies_between_layers_and_is_proven() -> None:
    pipe = cut_for_generation(model("gpt2"), 2)
    assert "bit for bit" in str(pipe.proof)
    assert any(name.startswith("transformer.h.") for name, _ in pipe.get_stage_module(1).named_parameters())


def test_split_points_can_be_given() -> None:
    pipe = cut_for_generation(model("llama"), 2, ["model.layers.1"], prove=False)
    names = {name for name, _ in pipe.get_stage_module(0).named_parameters()}
    assert any(name.startswith("model.layers.0.") for name in names)
    assert not any(name.startswith("model.layers.1.") for name in names)


def test_another_number_of_split_points_is_refused() -> None:
    with pytest.raises(ArgumentError, match="1 split points make 2 stages, not 3"):
        cut_for_generation(model("llama"), 3, ["model.layers.1"])


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ArgumentError, match="training mode"):
        cut_for_generation(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), 2)


def test_an_encoder_decoder_model_is_refused() -> None:
    config = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(NotSupported, match=r"T5ForConditionalGeneration is an encoder-decoder model"):
        cut_for_generation(transformers.T5ForConditionalGeneration(config).eval(), 2)


def test_a_model_without_generate_is_refused() -> None:
    with pytest.raises(NotSupported, match="Linear has no generate"):
        cut_for_generation(nn.Linear(2, 2), 2)


def test_a_loop_of_the_models_own_is_refused() -> None:
    class Own(transformers.LlamaForCausalLM):
        def _sample(self, *_args: object, **_options: object) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(NotSupported, match="Own has a _sample of its own"):
        cut_for_generation(Own(transformers.LlamaConfig(**LLAMA)).eval(), 2)
