"""Tiny decoders of ``transformers`` with random weights, and their prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from partita.integrations.generation import PipelineGenerator, cut_for_generation
from partita.pipelining import Pipe
from partita.runtime import Comm, InProcessWorld

VOCABULARY = 40
EOS, PAD = 3, 0
TOKENS = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": 1}
LLAMA: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
GPT2: dict[str, Any] = {**TOKENS, "n_positions": 64, "n_embd": 16, "n_layer": 4, "n_head": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", LLAMA),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", LLAMA),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 5}),
    "gemma3": (
        "Gemma3",
        {**LLAMA, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 2}),
    "mamba": ("Mamba", {**TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4}),
}
DECODERS = tuple(MODELS)
MODELS |= {
    "minimax": ("MiniMax", {**LLAMA, "num_local_experts": 2}),
    "recurrentgemma": (
        "RecurrentGemma",
        {
            **TOKENS,
            "hidden_size": 16,
            "lru_width": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "attention_window_size": 5,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            **LLAMA,
            "num_kv_shared_layers": 2,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
}


@cache
def model(name: str) -> Any:
    kind, size = MODELS[name]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    head = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    with torch.random.fork_rng():  # the first test that asks has the random numbers of any other
        torch.manual_seed(0)
        return head(config(**size)).eval()


@cache
def pipe(name: str, stages: int) -> Pipe:
    return cut_for_generation(model(name), stages, prove=False)


def prompts(rows: int = 4, length: int = 7) -> dict[str, Tensor]:
    """Of several lengths, padded on the left."""
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in enumerate(([3, 0, 1, 0] * rows)[:rows]):
        ids[row, :padding], mask[row, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def on_stages(name: str, stages: int, body: Callable[[PipelineGenerator], Any]) -> list[Any]:
    """What ``body`` returns on each rank."""

    def run(comm: Comm) -> Any:
        return body(PipelineGenerator(pipe(name, stages).build_stage(comm.rank, comm=comm), comm))

    pipe(name, stages)
    return InProcessWorld(stages).run(run)
