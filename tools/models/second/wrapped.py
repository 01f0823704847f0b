"""Models that are built from parts (x-transformers), and models with adapters (peft)."""

from __future__ import annotations

from typing import Any

import torch
from tools.models.architecture import Architecture
from tools.models.libraries import adapted, x_transformers
from tools.models.samples import image, ones, tokens, translation
from tools.models.settings import HEADS, LAYERS, VOCABULARY, WIDTH, decoder, vision

__all__ = ["WRAPPED"]

_SIZES = {"dim": WIDTH, "depth": LAYERS, "heads": HEADS, "attn_dim_head": 8}
_LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}


def ids(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids and a mask of truth values, with padding in the last sample."""
    mask = torch.ones(samples, 8, dtype=torch.bool)
    mask[-1, 6:] = False
    return {"x": torch.randint(3, VOCABULARY, (samples, 8)), "mask": mask}


def ids_only(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids."""
    return {"x": torch.randint(3, VOCABULARY, (samples, 8))}


def pair(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids for the encoder, and for the decoder, whose loss is returned."""
    return {
        "src": torch.randint(3, VOCABULARY, (samples, 8)),
        "tgt": torch.randint(3, VOCABULARY, (samples, 6)),
    }


WRAPPED: tuple[Architecture, ...] = (
    x_transformers(
        "decoder, rotary",
        lambda x: x.TransformerWrapper(
            num_tokens=VOCABULARY,
            max_seq_len=32,
            attn_layers=x.Decoder(rotary_pos_emb=True, ff_glu=True, attn_dropout=0.1, **_SIZES),
        ),
        ids_only,
    ),
    x_transformers(
        "encoder, alibi",
        lambda x: x.TransformerWrapper(
            num_tokens=VOCABULARY,
            max_seq_len=32,
            attn_layers=x.Encoder(alibi_pos_bias=True, use_rmsnorm=True, **_SIZES),
        ),
        ids,
    ),
    x_transformers(
        "vision",
        lambda x: x.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=10, attn_layers=x.Encoder(**_SIZES)
        ),
        lambda _config, samples: {"img": torch.randn(samples, 3, 32, 32)},
    ),
    x_transformers(
        "encoder and decoder",
        lambda x: x.XTransformer(
            dim=WIDTH,
            enc_num_tokens=VOCABULARY,
            enc_depth=2,
            enc_heads=HEADS,
            enc_max_seq_len=32,
            dec_num_tokens=VOCABULARY,
            dec_depth=2,
            dec_heads=HEADS,
            dec_max_seq_len=32,
        ),
        pair,
    ),
    adapted(
        "lora, llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        tokens,
        decoder(),
        "LoraConfig",
        target_modules=["q_proj", "v_proj"],
        **_LORA,
    ),
    adapted(
        "dora, qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        tokens,
        decoder(),
        "LoraConfig",
        target_modules=["q_proj", "down_proj"],
        use_dora=True,
        **_LORA,
    ),
    adapted(
        "prefix tuning, gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        ones,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
        "PrefixTuningConfig",
        task_type="CAUSAL_LM",
        num_virtual_tokens=3,
    ),
    adapted(
        "ia3, t5",
        "T5ForConditionalGeneration",
        "T5Config",
        translation,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        "IA3Config",
        task_type="SEQ_2_SEQ_LM",
    ),
    adapted(
        "lora, vit",
        "ViTForImageClassification",
        "ViTConfig",
        image,
        vision(),
        "LoraConfig",
        target_modules="all-linear",
        modules_to_save=["classifier"],
        **_LORA,
    ),
)
