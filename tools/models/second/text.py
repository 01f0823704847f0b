"""Speech, mixtures of experts, state space models, and other models of text and series."""

from __future__ import annotations

from typing import Any

import torch
from tools.models.architecture import Architecture, hf
from tools.models.samples import longer, ones, tokens, translation
from tools.models.settings import HEADS, LAYERS, VOCABULARY, WIDTH, both, decoder, text, wave

__all__ = ["TEXT"]


def spoken(config: Any, samples: int) -> dict[str, Any]:
    """Features of speech with padding for the encoder, token ids for the decoder."""
    mask = torch.ones(samples, 40, dtype=torch.int64)
    mask[-1, 32:] = 0
    return {
        "input_features": torch.randn(samples, 40, config.input_feat_per_channel),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, VOCABULARY, (samples, 6)),
    }


def heard(_config: Any, samples: int) -> dict[str, Any]:
    """Raw sound for the encoder, token ids for the decoder."""
    return {
        "input_values": torch.randn(samples, 2000),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (samples, 6)),
    }


def padded_sound(_config: Any, samples: int) -> dict[str, Any]:
    """Raw sound with padding in the last sample."""
    mask = torch.ones(samples, 2000, dtype=torch.int64)
    mask[-1, 1500:] = 0
    return {"input_values": torch.randn(samples, 2000), "attention_mask": mask}


def channel(_config: Any, samples: int) -> dict[str, Any]:
    """Raw sound with a dimension for channels."""
    return {"input_values": torch.randn(samples, 1, 320)}


def _mixed(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 4,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "num_experts": 4,
        "num_heads": HEADS,
        "decoder_start_token_id": 0,
        **more,
    }


_SPEECH = (
    hf(
        "speech_to_text, no layerdrop",
        "speech",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        spoken,
        both(
            input_feat_per_channel=8,
            num_conv_layers=2,
            conv_kernel_sizes=(3, 3),
            conv_channels=16,
            max_source_positions=64,
            max_target_positions=64,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
    ),
    hf(
        "moonshine",
        "speech",
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        heard,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": HEADS,
            "decoder_num_attention_heads": HEADS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    hf(
        "wav2vec2_conformer, no layerdrop",
        "speech",
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        padded_sound,
        wave(layerdrop=0.0, mask_time_prob=0.0, conv_depthwise_kernel_size=3),
    ),
    hf(
        "unispeech_sat, no layerdrop",
        "speech",
        "UniSpeechSatForCTC",
        "UniSpeechSatConfig",
        padded_sound,
        wave(layerdrop=0.0, mask_time_prob=0.0, num_clusters=8),
    ),
    hf(
        "encodec",
        "speech",
        "EncodecModel",
        "EncodecConfig",
        channel,
        {
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_size": 16,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
        },
    ),
)

_EXPERTS = (
    hf(
        "nllb_moe, no layerdrop",
        "mixture of experts",
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        translation,
        both(
            num_experts=4,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
            expert_capacity=64,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
    ),
    hf(
        "switch_transformers, encoder",
        "mixture of experts",
        "SwitchTransformersEncoderModel",
        "SwitchTransformersConfig",
        tokens,
        _mixed(),
    ),
    hf(
        "phimoe",
        "mixture of experts",
        "PhimoeForCausalLM",
        "PhimoeConfig",
        tokens,
        text(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    ),
    hf(
        "granitemoe, mask of ones",
        "mixture of experts",
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        ones,
        text(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    ),
    hf(
        "ernie4_5_moe",
        "mixture of experts",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        tokens,
        text(
            num_key_value_heads=2,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=WIDTH,
            moe_layer_start_index=1,
        ),
    ),
)

_STATE_SPACE = (
    hf(
        "zamba2",
        "state space",
        "Zamba2ForCausalLM",
        "Zamba2Config",
        tokens,
        text(
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            num_mem_blocks=1,
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=8,
            chunk_size=4,
            num_key_value_heads=4,
        ),
    ),
    hf(
        "bamba",
        "state space",
        "BambaForCausalLM",
        "BambaConfig",
        tokens,
        text(
            num_key_value_heads=2,
            attn_layer_indices=[1, 3],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=4,
            attn_rotary_emb=4,
        ),
    ),
    hf(
        "falcon_h1",
        "state space",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        tokens,
        decoder(
            mamba_d_ssm=64,
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=4,
        ),
    ),
    hf(
        "lfm2, mask of ones",
        "state space",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        ones,
        text(num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2),
    ),
)

_OTHERS = (
    hf(
        "led, no layerdrop",
        "text and series",
        "LEDForConditionalGeneration",
        "LEDConfig",
        lambda config, samples: {
            **longer(config, samples),
            "decoder_input_ids": torch.randint(3, VOCABULARY, (samples, 6)),
        },
        {
            **both(encoder_layerdrop=0.0, decoder_layerdrop=0.0, attention_window=4),
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    hf(
        "mobilebert, mask of ones",
        "text and series",
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        ones,
        text(embedding_size=WIDTH, intra_bottleneck_size=16, true_hidden_size=16),
    ),
    hf(
        "decision_transformer",
        "text and series",
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        lambda config, samples: {
            "states": torch.randn(samples, 5, config.state_dim),
            "actions": torch.randn(samples, 5, config.act_dim),
            "rewards": torch.randn(samples, 5, 1),
            "returns_to_go": torch.randn(samples, 5, 1),
            "timesteps": torch.randint(0, 100, (samples, 5)),
            "attention_mask": torch.ones(samples, 5),
        },
        {
            "state_dim": 6,
            "act_dim": 3,
            "hidden_size": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "max_ep_len": 128,
            "n_positions": 64,
        },
    ),
)

TEXT: tuple[Architecture, ...] = (*_SPEECH, *_EXPERTS, *_STATE_SPACE, *_OTHERS)
