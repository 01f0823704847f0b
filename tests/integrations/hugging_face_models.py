"""Tiny models of ``transformers`` with random weights, and the environment of a launcher for them."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from partita.runtime import Comm

VOCABULARY, LENGTH = 40, 8


def launched(comm: Comm) -> None:
    """Set what ``torchrun`` sets: ``accelerate`` looks for it."""
    torch.set_num_threads(1)
    place = {
        "RANK": comm.rank,
        "LOCAL_RANK": comm.rank,
        "WORLD_SIZE": comm.size,
        "LOCAL_WORLD_SIZE": comm.size,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "1"}


def model(name: str, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": VOCABULARY}
    if name == "gpt2":
        size |= {"n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 2}
        size |= {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    if name == "t5":
        size |= {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": layers, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**size, decoder_start_token_id=0, dropout_rate=0.0)
        )
    size |= {
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    size |= {"max_position_embeddings": 16}
    if name == "bert":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**size, **no_dropout))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=1))


def inputs(name: str, samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ["input_ids", "decoder_input_ids"] if name == "t5" else ["input_ids"]
    return {it: torch.randint(2, VOCABULARY, (samples, LENGTH), generator=generator) for it in names}
