"""Pictures: models of timm, and detectors."""

from __future__ import annotations

from typing import Any

import torch
from tools.models.architecture import Architecture, Inputs, hf
from tools.models.libraries import of_timm
from tools.models.settings import HEADS, WIDTH

__all__ = ["VISION"]


def picture(size: int) -> Inputs:
    """A square picture, as timm's models take it."""
    return lambda _config, samples: {"x": torch.randn(samples, 3, size, size)}


def pixels(size: int, *, masked: bool = False) -> Inputs:
    """A square picture, as detectors take it."""

    def inputs(_config: Any, samples: int) -> dict[str, Any]:
        values = {"pixel_values": torch.randn(samples, 3, size, size)}
        if masked:
            mask = torch.ones(samples, size, size, dtype=torch.int64)
            mask[-1, :, size // 2 :] = 0
            values["pixel_mask"] = mask
        return values

    return inputs


def _backbone() -> dict[str, Any]:
    return {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage4"],
    }


def _detr(**more: Any) -> dict[str, Any]:
    return {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": _backbone(),
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH,
        "num_queries": 5,
        **more,
    }


def _rt_detr() -> dict[str, Any]:
    return {
        "backbone_config": {
            "model_type": "rt_detr_resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "encoder_hidden_dim": WIDTH,
        "encoder_in_channels": [16, 32, 32],
        "encoder_ffn_dim": 2 * WIDTH,
        "encoder_attention_heads": HEADS,
        "d_model": WIDTH,
        "num_queries": 5,
        "decoder_in_channels": [WIDTH, WIDTH, WIDTH],
        "decoder_ffn_dim": 2 * WIDTH,
        "decoder_layers": 2,
        "decoder_attention_heads": HEADS,
        "num_denoising": 0,
    }


VISION: tuple[Architecture, ...] = (
    of_timm(
        "vit",
        "vit_tiny_patch16_224",
        picture(32),
        img_size=32,
        patch_size=8,
        embed_dim=WIDTH,
        depth=4,
        num_heads=HEADS,
        drop_path_rate=0.2,
        proj_drop_rate=0.1,
    ),
    of_timm(
        "eva02",
        "eva02_tiny_patch14_224",
        picture(28),
        img_size=28,
        embed_dim=WIDTH,
        depth=4,
        num_heads=HEADS,
        drop_path_rate=0.1,
    ),
    of_timm(
        "convnextv2",
        "convnextv2_atto",
        picture(64),
        dims=(8, 16, 24, 32),
        depths=(1, 1, 2, 1),
        drop_path_rate=0.1,
    ),
    of_timm("mixer", "MlpMixer", picture(32), img_size=32, patch_size=8, num_blocks=4, embed_dim=WIDTH),
    of_timm("regnety", "regnety_002", picture(64)),
    of_timm("densenet", "densenet121", picture(64), growth_rate=8, block_config=(2, 2, 2, 2)),
    of_timm("mobilenetv4", "mobilenetv4_conv_small", picture(64)),
    of_timm("hiera", "hiera_tiny_224", picture(64), img_size=(64, 64), embed_dim=16, stages=(1, 1, 2, 1)),
    of_timm(
        "xcit", "xcit_nano_12_p8_224", picture(32), img_size=32, depth=4, embed_dim=WIDTH, num_heads=HEADS
    ),
    of_timm(
        "davit",
        "davit_tiny",
        picture(64),
        depths=(1, 1, 1, 1),
        embed_dims=(16, 16, 32, 32),
        num_heads=(2, 2, 4, 4),
        window_size=2,
    ),
    hf("detr", "detection", "DetrForObjectDetection", "DetrConfig", pixels(64, masked=True), _detr()),
    hf(
        "conditional_detr",
        "detection",
        "ConditionalDetrForObjectDetection",
        "ConditionalDetrConfig",
        pixels(64),
        _detr(),
    ),
    hf(
        "deformable_detr",
        "detection",
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        pixels(64),
        _detr(
            backbone_config={**_backbone(), "out_features": ["stage2", "stage3", "stage4"]},
            num_feature_levels=4,
        ),
    ),
    hf("rt_detr", "detection", "RTDetrForObjectDetection", "RTDetrConfig", pixels(64), _rt_detr()),
    hf(
        "yolos",
        "detection",
        "YolosForObjectDetection",
        "YolosConfig",
        pixels(32),
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": HEADS,
            "intermediate_size": 2 * WIDTH,
            "image_size": [32, 32],
            "patch_size": 8,
            "num_detection_tokens": 5,
        },
    ),
)
