"""Settings that configurations share: as small as an architecture allows, but deep enough to be cut in 4."""

from __future__ import annotations

from typing import Any

VOCABULARY = 99
WIDTH = 32
LAYERS = 4
HEADS = 4


def text(**more: Any) -> dict[str, Any]:
    """Settings that most text models share."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**common, **more}


def decoder(**more: Any) -> dict[str, Any]:
    return text(num_key_value_heads=2, head_dim=8, **more)


def both(**more: Any) -> dict[str, Any]:
    """Settings that the BART family shares."""
    return {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        **more,
    }


def vision(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "image_size": 32,
        "patch_size": 8,
        **more,
    }


def depth() -> dict[str, Any]:
    return vision(
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16
    )


def wave(**more: Any) -> dict[str, Any]:
    return text(
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        **more,
    )


def moe(**more: Any) -> dict[str, Any]:
    return decoder(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH, **more)
