"""Pictures, sound and words together."""

from __future__ import annotations

from typing import Any

import torch
from tools.models.architecture import Architecture, Inputs, hf
from tools.models.samples import tokens
from tools.models.settings import HEADS, LAYERS, VOCABULARY, WIDTH, decoder, text, vision

__all__ = ["MULTIMODAL"]

IMAGE = 90
"""The token that stands where a picture goes."""


def with_pictures(count: int, pictures: Inputs) -> Inputs:
    """Token ids that begin with so many places for a picture; padding in the last sample; and pictures."""

    def inputs(config: Any, samples: int) -> dict[str, Any]:
        ids = torch.randint(3, IMAGE - 5, (samples, count + 8))
        ids[:, 1 : 1 + count] = IMAGE
        mask = torch.ones_like(ids)
        mask[-1, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, **pictures(config, samples)}

    return inputs


def square(size: int) -> Inputs:
    """A square picture a sample."""
    return lambda _config, samples: {"pixel_values": torch.randn(samples, 3, size, size)}


def patches(_config: Any, samples: int) -> dict[str, Any]:
    """What Qwen's vision towers take: patches of all pictures in a row, and how many each has."""
    patch = 3 * 2 * 4 * 4
    return {
        "pixel_values": torch.randn(samples * 16, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * samples),
    }


def qwen(config: Any, samples: int) -> dict[str, Any]:
    """Patches, and which tokens are a picture."""
    inputs = with_pictures(4, patches)(config, samples)
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == IMAGE).to(torch.int64)}


def _qwen_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": HEADS,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": WIDTH,
        **more,
    }


_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


def siglip2(_config: Any, samples: int) -> dict[str, Any]:
    """Patches of pictures of any shape, and token ids."""
    mask = torch.ones(samples, 16, dtype=torch.int64)
    mask[-1, 12:] = 0
    shapes = torch.tensor([[4, 4]] * (samples - 1) + [[4, 3]])
    return {
        "input_ids": torch.randint(3, VOCABULARY, (samples, 8)),
        "pixel_values": torch.randn(samples, 16, 3 * 8 * 8),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


def several_pictures(_config: Any, samples: int) -> dict[str, Any]:
    """One picture in a sample, with a dimension for more."""
    return {"pixel_values": torch.randn(samples, 1, 3, 32, 32)}


def sized(_config: Any, samples: int) -> dict[str, Any]:
    """Pictures and their sizes."""
    return {
        "pixel_values": torch.randn(samples, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 32]] * samples),
    }


def segmented(_config: Any, samples: int) -> dict[str, Any]:
    """Token ids and pictures, for segmentation by a text."""
    return {**tokens(_config, samples), "pixel_values": torch.randn(samples, 3, 32, 32)}


MULTIMODAL: tuple[Architecture, ...] = (
    hf(
        "qwen2_5_vl",
        "multimodal",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        qwen,
        {
            "text_config": text(
                num_key_value_heads=2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            ),
            "vision_config": _qwen_vision(window_size=16, fullatt_block_indexes=[1]),
            **_TOKENS,
        },
    ),
    hf(
        "qwen3_vl",
        "multimodal",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        qwen,
        {
            "text_config": decoder(
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            ),
            "vision_config": _qwen_vision(num_position_embeddings=64, deepstack_visual_indexes=[0]),
            **_TOKENS,
        },
    ),
    hf(
        "smolvlm",
        "multimodal",
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        with_pictures(4, several_pictures),
        {
            "text_config": {"model_type": "llama", **decoder()},
            "vision_config": vision(num_hidden_layers=2),
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
    ),
    hf(
        "mistral3",
        "multimodal",
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        with_pictures(4, sized),
        {
            "text_config": {"model_type": "mistral", **decoder()},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": WIDTH,
                "intermediate_size": 2 * WIDTH,
                "num_hidden_layers": 2,
                "num_attention_heads": HEADS,
                "head_dim": 8,
                "image_size": 32,
                "patch_size": 8,
            },
            "image_token_id": IMAGE,
            "spatial_merge_size": 2,
        },
    ),
    hf(
        "siglip2",
        "multimodal",
        "Siglip2Model",
        "Siglip2Config",
        siglip2,
        {
            "text_config": text(),
            "vision_config": {
                "hidden_size": WIDTH,
                "intermediate_size": 2 * WIDTH,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_patches": 16,
                "patch_size": 8,
            },
        },
    ),
    hf(
        "gemma3n",
        "multimodal",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        tokens,
        decoder(
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=4,
            activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
        ),
    ),
    hf(
        "paligemma",
        "multimodal",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        with_pictures(16, square(32)),
        {
            "text_config": {"model_type": "gemma", **decoder()},
            "vision_config": {
                "model_type": "siglip_vision_model",
                **vision(num_hidden_layers=2, projection_dim=WIDTH),
            },
            "image_token_id": IMAGE,
            "projection_dim": WIDTH,
            "hidden_size": WIDTH,
        },
    ),
    hf(
        "blip_2",
        "multimodal",
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        with_pictures(4, square(32)),
        {
            "text_config": {"model_type": "opt", **text(ffn_dim=64, word_embed_proj_dim=WIDTH)},
            "vision_config": vision(num_hidden_layers=2),
            "qformer_config": text(encoder_hidden_size=WIDTH, num_hidden_layers=2),
            "num_query_tokens": 4,
            "image_token_index": IMAGE,
        },
    ),
    hf(
        "clipseg",
        "multimodal",
        "CLIPSegForImageSegmentation",
        "CLIPSegConfig",
        segmented,
        {
            "text_config": text(),
            "vision_config": vision(),
            "projection_dim": 16,
            "extract_layers": [1, 2, 3],
            "reduce_dim": 16,
        },
    ),
    hf(
        "vilt",
        "multimodal",
        "ViltForQuestionAnswering",
        "ViltConfig",
        lambda config, samples: {
            **tokens(config, samples),
            "pixel_values": torch.randn(samples, 3, 32, 32),
            "pixel_mask": torch.ones(samples, 32, 32, dtype=torch.int64),
        },
        {**text(), **vision(), "max_image_length": 16},
    ),
)
