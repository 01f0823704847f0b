"""The architectures: a tiny configuration with random weights of each, and example inputs.

A configuration is as small as the architecture allows, but deep enough to be cut in four. What is not set is
the architecture's own default: dropout, caches, rotary embeddings and masks are as users have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ZOO", "Architecture", "make_inputs", "make_model"]

Inputs = Callable[[Any, int], dict[str, Any]]

VOCABULARY = 99
WIDTH = 32
LAYERS = 4
HEADS = 4


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: what the row is called.
        family: the group of rows that it stands in.
        model: the class in ``transformers``.
        config: its configuration's class.
        inputs: from the configuration and a batch size to keyword arguments.
        settings: what the configuration is made with.
    """

    name: str
    family: str
    model: str
    config: str
    inputs: Inputs
    settings: Mapping[str, Any] = field(default_factory=dict)


def make_model(architecture: Architecture) -> tuple[nn.Module, Any]:
    """The model, in the same random state each time, and its configuration."""
    import transformers  # an extra, and slow

    config = getattr(transformers, architecture.config)(**architecture.settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, architecture.model)(config), config


def make_inputs(architecture: Architecture, config: Any, samples: int, seed: int = 1) -> dict[str, Any]:
    """Keyword arguments for a batch of so many samples."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return architecture.inputs(config, samples)


def _ids(samples: int, length: int = 8) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, length))


def tokens(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids and a padding mask in which the last sample is shorter."""
    mask = torch.ones(samples, 8, dtype=torch.int64)
    mask[-1, 6:] = 0
    return {"input_ids": _ids(samples), "attention_mask": mask}


def ones(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids and a mask that hides nothing."""
    return {"input_ids": _ids(samples), "attention_mask": torch.ones(samples, 8, dtype=torch.int64)}


def ids_only(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids alone: the model makes its own mask."""
    return {"input_ids": _ids(samples)}


def labelled(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids and labels: the model computes its own loss."""
    given = _ids(samples)
    return {"input_ids": given, "labels": given.clone()}


def translation(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids for the encoder and for the decoder."""
    return {**tokens(_config, samples), "decoder_input_ids": _ids(samples, 6)}


def image(config: Any, samples: int) -> dict[str, Any]:
    """Square pictures."""
    size = getattr(config, "image_size", 32)
    return {"pixel_values": torch.randn(samples, 3, size, size)}


def waveform(_config: Any, samples: int) -> dict[str, Any]:
    """Raw sound."""
    return {"input_values": torch.randn(samples, 2000)}


def spectrogram(config: Any, samples: int) -> dict[str, Any]:
    """What an audio spectrogram transformer takes."""
    return {"input_values": torch.randn(samples, config.max_length, config.num_mel_bins)}


def speech(config: Any, samples: int) -> dict[str, Any]:
    """A log-mel spectrogram for the encoder, token ids for the decoder."""
    return {
        "input_features": torch.randn(samples, config.num_mel_bins, 2 * config.max_source_positions),
        "decoder_input_ids": _ids(samples, 6),
    }


def picture_and_words(config: Any, samples: int) -> dict[str, Any]:
    """For models of pictures and text."""
    size = config.vision_config.image_size
    return {**tokens(config, samples), "pixel_values": torch.randn(samples, 3, size, size)}


def series(config: Any, samples: int) -> dict[str, Any]:
    """A time series."""
    return {"past_values": torch.randn(samples, config.context_length, config.num_input_channels)}


def longer(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids and padding for models that look at blocks or strides of a sequence."""
    mask = torch.ones(samples, 48, dtype=torch.int64)
    mask[-1, 44:] = 0
    return {"input_ids": _ids(samples, 48), "attention_mask": mask}


def forecast(config: Any, samples: int) -> dict[str, Any]:
    """A time series with its future, from which the model computes its own loss."""
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(samples, past),
        "past_time_features": torch.randn(samples, past, 1),
        "past_observed_mask": torch.ones(samples, past),
        "future_values": torch.randn(samples, future),
        "future_time_features": torch.randn(samples, future, 1),
    }


def features(config: Any, samples: int) -> dict[str, Any]:
    """Sound, already made into features."""
    return {"input_features": torch.randn(samples, 40, config.feature_projection_input_dim)}


def _text(**more: Any) -> dict[str, Any]:
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


def _decoder(**more: Any) -> dict[str, Any]:
    return _text(num_key_value_heads=2, head_dim=8, **more)


def _both(**more: Any) -> dict[str, Any]:
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


def _vision(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "image_size": 32,
        "patch_size": 8,
        **more,
    }


def _depth() -> dict[str, Any]:
    return _vision(
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16
    )


def _wave(**more: Any) -> dict[str, Any]:
    return _text(
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        **more,
    )


def _moe(**more: Any) -> dict[str, Any]:
    return _decoder(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH, **more)


_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}

ZOO: tuple[Architecture, ...] = (
    # decoders
    Architecture(
        "gpt2",
        "decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        tokens,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
    ),
    Architecture(
        "gpt2, own loss",
        "decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        labelled,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
    ),
    Architecture(
        "gpt_neo",
        "decoder",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        tokens,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
        },
    ),
    Architecture("gpt_neox", "decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", tokens, _text()),
    Architecture(
        "gptj",
        "decoder",
        "GPTJForCausalLM",
        "GPTJConfig",
        tokens,
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 64,
            "rotary_dim": 4,
        },
    ),
    Architecture("llama", "decoder", "LlamaForCausalLM", "LlamaConfig", tokens, _decoder()),
    Architecture("llama, own mask", "decoder", "LlamaForCausalLM", "LlamaConfig", ids_only, _decoder()),
    Architecture("llama, mask of ones", "decoder", "LlamaForCausalLM", "LlamaConfig", ones, _decoder()),
    Architecture(
        "llama, no cache", "decoder", "LlamaForCausalLM", "LlamaConfig", tokens, _decoder(use_cache=False)
    ),
    Architecture(
        "mistral", "decoder", "MistralForCausalLM", "MistralConfig", tokens, _decoder(sliding_window=4)
    ),
    Architecture("qwen2", "decoder", "Qwen2ForCausalLM", "Qwen2Config", tokens, _decoder()),
    Architecture("qwen3", "decoder", "Qwen3ForCausalLM", "Qwen3Config", tokens, _decoder()),
    Architecture("gemma", "decoder", "GemmaForCausalLM", "GemmaConfig", tokens, _decoder()),
    Architecture(
        "gemma2", "decoder", "Gemma2ForCausalLM", "Gemma2Config", tokens, _decoder(sliding_window=4)
    ),
    Architecture(
        "gemma3", "decoder", "Gemma3ForCausalLM", "Gemma3TextConfig", tokens, _decoder(sliding_window=4)
    ),
    Architecture("phi", "decoder", "PhiForCausalLM", "PhiConfig", tokens, _text()),
    Architecture("phi3", "decoder", "Phi3ForCausalLM", "Phi3Config", tokens, _text(num_key_value_heads=2)),
    Architecture(
        "opt",
        "decoder",
        "OPTForCausalLM",
        "OPTConfig",
        tokens,
        _text(ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    ),
    Architecture(
        "bloom",
        "decoder",
        "BloomForCausalLM",
        "BloomConfig",
        tokens,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    ),
    Architecture("falcon", "decoder", "FalconForCausalLM", "FalconConfig", tokens, _text()),
    Architecture("stablelm", "decoder", "StableLmForCausalLM", "StableLmConfig", tokens, _decoder()),
    Architecture("olmo2", "decoder", "Olmo2ForCausalLM", "Olmo2Config", tokens, _decoder()),
    Architecture("cohere", "decoder", "CohereForCausalLM", "CohereConfig", tokens, _decoder()),
    Architecture("starcoder2", "decoder", "Starcoder2ForCausalLM", "Starcoder2Config", tokens, _decoder()),
    Architecture("granite", "decoder", "GraniteForCausalLM", "GraniteConfig", tokens, _decoder()),
    Architecture("smollm3", "decoder", "SmolLM3ForCausalLM", "SmolLM3Config", tokens, _decoder()),
    Architecture(
        "gpt_bigcode",
        "decoder",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        tokens,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
    ),
    Architecture(
        "mpt",
        "decoder",
        "MptForCausalLM",
        "MptConfig",
        tokens,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64},
    ),
    Architecture("persimmon", "decoder", "PersimmonForCausalLM", "PersimmonConfig", tokens, _text()),
    Architecture(
        "cohere2", "decoder", "Cohere2ForCausalLM", "Cohere2Config", tokens, _decoder(sliding_window=4)
    ),
    Architecture("nemotron", "decoder", "NemotronForCausalLM", "NemotronConfig", tokens, _decoder()),
    Architecture("glm4", "decoder", "Glm4ForCausalLM", "Glm4Config", tokens, _decoder()),
    # encoders
    Architecture("bert", "encoder", "BertForMaskedLM", "BertConfig", tokens, _text()),
    Architecture("roberta", "encoder", "RobertaForMaskedLM", "RobertaConfig", tokens, _text()),
    Architecture(
        "distilbert",
        "encoder",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        tokens,
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64},
    ),
    Architecture(
        "electra", "encoder", "ElectraForPreTraining", "ElectraConfig", tokens, _text(embedding_size=16)
    ),
    Architecture(
        "deberta",
        "encoder",
        "DebertaForSequenceClassification",
        "DebertaConfig",
        tokens,
        _text(relative_attention=True, pos_att_type=["c2p", "p2c"]),
    ),
    Architecture(
        "deberta_v2",
        "encoder",
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        tokens,
        _text(relative_attention=True, pos_att_type=["c2p", "p2c"]),
    ),
    Architecture(
        "albert (shared layers)",
        "encoder",
        "AlbertForMaskedLM",
        "AlbertConfig",
        tokens,
        _text(embedding_size=16),
    ),
    Architecture("modernbert", "encoder", "ModernBertForMaskedLM", "ModernBertConfig", tokens, _text()),
    Architecture("mpnet", "encoder", "MPNetForMaskedLM", "MPNetConfig", tokens, _text()),
    Architecture(
        "xlm_roberta", "encoder", "XLMRobertaForTokenClassification", "XLMRobertaConfig", tokens, _text()
    ),
    Architecture(
        "roformer", "encoder", "RoFormerForMaskedLM", "RoFormerConfig", tokens, _text(embedding_size=WIDTH)
    ),
    Architecture(
        "xlnet",
        "encoder",
        "XLNetLMHeadModel",
        "XLNetConfig",
        tokens,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 64},
    ),
    Architecture(
        "esm",
        "encoder",
        "EsmForMaskedLM",
        "EsmConfig",
        tokens,
        _text(position_embedding_type="rotary", mask_token_id=4),
    ),
    Architecture(
        "big_bird",
        "encoder",
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        longer,
        _text(block_size=4, num_random_blocks=1),
    ),
    Architecture(
        "longformer",
        "encoder",
        "LongformerForMaskedLM",
        "LongformerConfig",
        longer,
        _text(attention_window=4),
    ),
    # encoders and decoders
    Architecture(
        "t5",
        "encoder-decoder",
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
    ),
    Architecture(
        "mt5",
        "encoder-decoder",
        "MT5ForConditionalGeneration",
        "MT5Config",
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
    ),
    Architecture(
        "bart", "encoder-decoder", "BartForConditionalGeneration", "BartConfig", translation, _both()
    ),
    Architecture(
        "mbart", "encoder-decoder", "MBartForConditionalGeneration", "MBartConfig", translation, _both()
    ),
    Architecture(
        "pegasus", "encoder-decoder", "PegasusForConditionalGeneration", "PegasusConfig", translation, _both()
    ),
    Architecture("marian", "encoder-decoder", "MarianMTModel", "MarianConfig", translation, _both()),
    Architecture(
        "m2m_100", "encoder-decoder", "M2M100ForConditionalGeneration", "M2M100Config", translation, _both()
    ),
    Architecture(
        "m2m_100, no layerdrop",
        "encoder-decoder",
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        translation,
        _both(encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    ),
    Architecture(
        "longt5",
        "encoder-decoder",
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        translation,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
            "local_radius": 3,
        },
    ),
    # vision
    Architecture("vit", "vision", "ViTForImageClassification", "ViTConfig", image, _vision()),
    Architecture("deit", "vision", "DeiTForImageClassification", "DeiTConfig", image, _vision()),
    Architecture("beit", "vision", "BeitForImageClassification", "BeitConfig", image, _vision()),
    Architecture(
        "beit, relative positions",
        "vision",
        "BeitForImageClassification",
        "BeitConfig",
        image,
        _vision(use_relative_position_bias=True),
    ),
    Architecture("dinov2", "vision", "Dinov2ForImageClassification", "Dinov2Config", image, _vision()),
    Architecture(
        "swin",
        "vision",
        "SwinForImageClassification",
        "SwinConfig",
        image,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    Architecture("convnext", "vision", "ConvNextForImageClassification", "ConvNextConfig", image, _STAGES),
    Architecture(
        "resnet",
        "vision",
        "ResNetForImageClassification",
        "ResNetConfig",
        image,
        {**_STAGES, "embedding_size": 16, "layer_type": "basic"},
    ),
    Architecture(
        "segformer",
        "vision",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        image,
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 16, 32, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 32,
        },
    ),
    Architecture(
        "mobilenet_v2",
        "vision",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        image,
        {"image_size": 32},
    ),
    Architecture(
        "efficientnet",
        "vision",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        image,
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    ),
    Architecture(
        "swinv2",
        "vision",
        "Swinv2ForImageClassification",
        "Swinv2Config",
        image,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    Architecture(
        "levit",
        "vision",
        "LevitForImageClassification",
        "LevitConfig",
        image,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    Architecture("dpt", "vision", "DPTForDepthEstimation", "DPTConfig", image, _depth()),
    Architecture(
        "poolformer", "vision", "PoolFormerForImageClassification", "PoolFormerConfig", image, _STAGES
    ),
    Architecture(
        "clip",
        "vision and text",
        "CLIPModel",
        "CLIPConfig",
        picture_and_words,
        {"text_config": _text(), "vision_config": _vision(), "projection_dim": 16},
    ),
    Architecture(
        "siglip",
        "vision and text",
        "SiglipModel",
        "SiglipConfig",
        picture_and_words,
        {"text_config": _text(), "vision_config": _vision()},
    ),
    Architecture(
        "blip",
        "vision and text",
        "BlipForConditionalGeneration",
        "BlipConfig",
        picture_and_words,
        {"text_config": _text(encoder_hidden_size=WIDTH), "vision_config": _vision()},
    ),
    # audio
    Architecture("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", waveform, _wave()),
    Architecture("hubert", "audio", "HubertForCTC", "HubertConfig", waveform, _wave()),
    Architecture("wavlm", "audio", "WavLMForCTC", "WavLMConfig", waveform, _wave()),
    Architecture(
        "wav2vec2, no layerdrop",
        "audio",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        waveform,
        _wave(layerdrop=0.0, mask_time_prob=0.0),
    ),
    Architecture(
        "hubert, no layerdrop",
        "audio",
        "HubertForCTC",
        "HubertConfig",
        waveform,
        _wave(layerdrop=0.0, mask_time_prob=0.0),
    ),
    Architecture(
        "whisper",
        "audio",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        speech,
        _both(num_mel_bins=8, max_source_positions=16, max_target_positions=64),
    ),
    Architecture(
        "ast",
        "audio",
        "ASTForAudioClassification",
        "ASTConfig",
        spectrogram,
        {**_vision(), "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4},
    ),
    Architecture(
        "sew, no layerdrop",
        "audio",
        "SEWForCTC",
        "SEWConfig",
        waveform,
        _wave(layerdrop=0.0, mask_time_prob=0.0, squeeze_factor=2),
    ),
    Architecture(
        "wav2vec2_bert, no layerdrop",
        "audio",
        "Wav2Vec2BertForCTC",
        "Wav2Vec2BertConfig",
        features,
        _text(
            feature_projection_input_dim=16, layerdrop=0.0, mask_time_prob=0.0, conv_depthwise_kernel_size=3
        ),
    ),
    # mixture of experts
    Architecture(
        "mixtral",
        "mixture of experts",
        "MixtralForCausalLM",
        "MixtralConfig",
        tokens,
        _decoder(num_local_experts=4),
    ),
    Architecture(
        "qwen2_moe",
        "mixture of experts",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        tokens,
        _moe(shared_expert_intermediate_size=32),
    ),
    Architecture("qwen3_moe", "mixture of experts", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", tokens, _moe()),
    Architecture(
        "olmoe",
        "mixture of experts",
        "OlmoeForCausalLM",
        "OlmoeConfig",
        tokens,
        _text(num_experts=4, num_experts_per_tok=2),
    ),
    Architecture(
        "gpt_oss",
        "mixture of experts",
        "GptOssForCausalLM",
        "GptOssConfig",
        tokens,
        _decoder(num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    ),
    Architecture(
        "deepseek_v3",
        "mixture of experts",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        tokens,
        _text(
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
    ),
    Architecture(
        "switch_transformers",
        "mixture of experts",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        translation,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
    ),
    Architecture(
        "llama4",
        "mixture of experts",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        tokens,
        _decoder(num_local_experts=4, intermediate_size_mlp=64, attention_chunk_size=4),
    ),
    Architecture(
        "dbrx",
        "mixture of experts",
        "DbrxForCausalLM",
        "DbrxConfig",
        tokens,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": WIDTH,
            },
        },
    ),
    # state space and recurrent
    Architecture(
        "mamba",
        "state space",
        "MambaForCausalLM",
        "MambaConfig",
        tokens,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8},
    ),
    Architecture(
        "mamba2",
        "state space",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        tokens,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    Architecture(
        "falcon_mamba",
        "state space",
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        tokens,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8},
    ),
    Architecture(
        "recurrent_gemma",
        "state space",
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        tokens,
        _decoder(lru_width=WIDTH, attention_window_size=8),
    ),
    Architecture(
        "rwkv",
        "state space",
        "RwkvForCausalLM",
        "RwkvConfig",
        ids_only,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "context_length": 64},
    ),
    Architecture(
        "jamba",
        "state space",
        "JambaForCausalLM",
        "JambaConfig",
        tokens,
        _text(
            num_key_value_heads=2,
            num_experts=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
    ),
    Architecture(
        "qwen3_next",
        "state space",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        tokens,
        _moe(
            shared_expert_intermediate_size=32,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    # others
    Architecture(
        "patchtst",
        "others",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        series,
        {
            "num_input_channels": 2,
            "context_length": 32,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": 64,
        },
    ),
    Architecture(
        "patchtsmixer",
        "others",
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        series,
        {
            "num_input_channels": 2,
            "context_length": 32,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": WIDTH,
            "num_layers": LAYERS,
        },
    ),
    Architecture(
        "informer, no layerdrop",
        "others",
        "InformerForPrediction",
        "InformerConfig",
        forecast,
        {
            "context_length": 8,
            "prediction_length": 4,
            "lags_sequence": [1, 2, 3],
            "num_time_features": 1,
            "d_model": WIDTH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
    ),
    Architecture("fnet", "others", "FNetForMaskedLM", "FNetConfig", ids_only, _text()),
)
