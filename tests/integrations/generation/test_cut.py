"""Models of transformers are cut between their layers, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tests.integrations.generation.generation_models import LLAMA, model, prompts
from torch import nn

from partita.errors import ArgumentError, CaptureError, NotSupported
from partita.integrations.generation import PipelineGenerator, cut_for_generation
from partita.pipelining.checkpoints import load_safetensors
from partita.pipelining.stages import materialise, parameters_on_meta
from partita.runtime import Comm, InProcessWorld


def test_the_cut_lies_between_layers_and_is_proven() -> None:
    pipe = cut_for_generation(model("gpt2"), 2)
    assert "bit for bit" in str(pipe.proof)
    assert any(name.startswith("transformer.h.") for name, _ in pipe.get_stage_module(1).named_parameters())


def test_split_points_can_be_given() -> None:
    pipe = cut_for_generation(model("llama"), 2, ["model.layers.1"], prove=False)
    names = {name for name, _ in pipe.get_stage_module(0).named_parameters()}
    assert any(name.startswith("model.layers.0.") for name in names)
    assert not any(name.startswith("model.layers.1.") for name in names)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_model_on_the_meta_device_generates_once_each_stage_has_its_weights(
    name: str, tmp_path: Path
) -> None:
    real = model(name)
    real.save_pretrained(tmp_path)
    kind, config = type(real), real.config
    with torch.device("meta"):
        on_meta = kind(config).eval()
    with parameters_on_meta():
        tables = kind(config)
    pipe = cut_for_generation(on_meta, 2, prove=False)

    def run(comm: Comm) -> list[list[int]]:
        stage = pipe.build_stage(comm.rank, "cpu", comm=comm)
        materialise(stage, "cpu", init_buffers=tables)
        load_safetensors(stage, tmp_path)
        return PipelineGenerator(stage, comm).generate(**prompts(), max_new_tokens=4).tolist()

    expected = real.generate(**prompts(), max_new_tokens=4).tolist()
    assert InProcessWorld(2).run(run) == [expected, expected]


def test_a_model_that_reads_values_is_not_cut_on_the_meta_device() -> None:
    class Reads(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **options: object) -> object:
            assert input_ids.sum().item() > 0
            return super().forward(input_ids, **options)

    with torch.device("meta"):
        on_meta = Reads(transformers.LlamaConfig(**LLAMA)).eval()
    with pytest.raises(CaptureError, match="Reads can't be cut on the meta device, since it reads values"):
        cut_for_generation(on_meta, 2, prove=False)


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
