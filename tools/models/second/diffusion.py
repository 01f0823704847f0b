"""Diffusion models and autoencoders of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from tools.models.architecture import Architecture
from tools.models.libraries import diffusers
from tools.models.settings import WIDTH

__all__ = ["DIFFUSION"]


def _steps(samples: int) -> torch.Tensor:
    return torch.randint(0, 1000, (samples,))


def noise(config: Any, samples: int) -> dict[str, Any]:
    """A noisy picture and how noisy it is."""
    size = config.sample_size
    return {"sample": torch.randn(samples, config.in_channels, size, size), "timestep": _steps(samples)}


def noise_and_words(config: Any, samples: int) -> dict[str, Any]:
    """A noisy picture with an encoded text."""
    return {
        **noise(config, samples),
        "encoder_hidden_states": torch.randn(samples, 7, config.cross_attention_dim),
    }


def noise_and_class(config: Any, samples: int) -> dict[str, Any]:
    """A noisy picture and its class."""
    size = config.sample_size
    return {
        "hidden_states": torch.randn(samples, config.in_channels, size, size),
        "timestep": _steps(samples),
        "class_labels": torch.randint(0, 10, (samples,)),
    }


def sd3(config: Any, samples: int) -> dict[str, Any]:
    """What Stable Diffusion 3 takes."""
    size = config.sample_size
    return {
        "hidden_states": torch.randn(samples, config.in_channels, size, size),
        "encoder_hidden_states": torch.randn(samples, 7, config.joint_attention_dim),
        "pooled_projections": torch.randn(samples, config.pooled_projection_dim),
        "timestep": _steps(samples),
    }


def flux(config: Any, samples: int) -> dict[str, Any]:
    """What Flux takes: a packed picture, a text, and where each of their tokens stands."""
    return {
        "hidden_states": torch.randn(samples, 16, config.in_channels),
        "encoder_hidden_states": torch.randn(samples, 7, config.joint_attention_dim),
        "pooled_projections": torch.randn(samples, config.pooled_projection_dim),
        "timestep": torch.rand(samples),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(7, 3),
    }


def picture(config: Any, samples: int) -> dict[str, Any]:
    """A picture."""
    return {"sample": torch.randn(samples, config.in_channels, 16, 16)}


def noise_and_caption(config: Any, samples: int) -> dict[str, Any]:
    """A noisy picture with an encoded caption and its padding."""
    size = config.sample_size
    mask = torch.ones(samples, 7)
    mask[-1, 5:] = 0
    return {
        "hidden_states": torch.randn(samples, config.in_channels, size, size),
        "encoder_hidden_states": torch.randn(samples, 7, config.caption_channels),
        "encoder_attention_mask": mask,
        "timestep": _steps(samples),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def video(config: Any, samples: int) -> dict[str, Any]:
    """A noisy video with an encoded text."""
    return {
        "hidden_states": torch.randn(samples, config.in_channels, 2, 8, 8),
        "timestep": _steps(samples),
        "encoder_hidden_states": torch.randn(samples, 7, config.text_dim),
    }


def _unet(**more: Any) -> dict[str, Any]:
    return {
        "sample_size": 16,
        "block_out_channels": (16, WIDTH),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 8,
        **more,
    }


DIFFUSION: tuple[Architecture, ...] = (
    diffusers(
        "unet2d",
        "UNet2DModel",
        noise,
        **_unet(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
    ),
    diffusers(
        "unet2d_condition",
        "UNet2DConditionModel",
        noise_and_words,
        **_unet(
            in_channels=4,
            out_channels=4,
            cross_attention_dim=WIDTH,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
    ),
    diffusers(
        "dit",
        "DiTTransformer2DModel",
        noise_and_class,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    diffusers(
        "sd3",
        "SD3Transformer2DModel",
        sd3,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=16,
    ),
    diffusers(
        "flux",
        "FluxTransformer2DModel",
        flux,
        ("img_ids", "txt_ids"),
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    ),
    diffusers(
        "autoencoder_kl",
        "AutoencoderKL",
        picture,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, WIDTH),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    ),
    diffusers(
        "vq_model",
        "VQModel",
        picture,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, WIDTH),
        layers_per_block=1,
        latent_channels=3,
        num_vq_embeddings=16,
        norm_num_groups=4,
    ),
    diffusers(
        "pixart",
        "PixArtTransformer2DModel",
        noise_and_caption,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        use_additional_conditions=False,
    ),
    diffusers(
        "wan",
        "WanTransformer3DModel",
        video,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=2 * WIDTH,
        num_layers=4,
    ),
)
