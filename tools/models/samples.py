"""Inputs: what the rows are given, by the kind of model, drawn at random."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tools.models.settings import VOCABULARY
from torch import Tensor

KINDS = Literal["own", "ones", "padded"]


def varied(inputs: dict[str, Any], kind: KINDS) -> dict[str, Any]:
    """The same inputs with other masks: of ones, or with another padding in each sample."""
    masks = {name: value for name, value in inputs.items() if is_mask(name)}
    if kind == "own":
        return inputs
    change = torch.ones_like if kind == "ones" else padded
    return {**inputs, **{name: change(value) for name, value in masks.items()}}


def is_mask(name: str) -> bool:
    """Whether an argument of this name says which places of a sequence are padding."""
    return name.endswith(("attention_mask", "attn_mask", "mask")) and "pixel" not in name


def padded(mask: Tensor) -> Tensor:
    """A mask whose samples end at other places: one, two or three before the end."""
    other = torch.ones_like(mask)
    for sample in range(len(other)):
        other[sample, -1 - sample % 3 :] = 0
    return other


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
    ids = _ids(samples)
    return {"input_ids": ids, "labels": ids.clone()}


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
