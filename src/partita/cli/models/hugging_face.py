"""A Hugging Face model from its configuration alone: random or no weights, nothing downloaded or executed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.cli.models.hugging_face_config import (
    DTYPES,
    HuggingFaceModel,
    error_line,
    find_model_class,
    import_transformers,
    parse_settings,
    read_config,
)
from partita.cli.models.user_file import Built
from partita.errors import UsageError

__all__ = ["build_hugging_face", "build_pretrained"]

_OF_WHOLE_SAMPLES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
"""Classes by the ends of their names, whose labels are one number a sample."""
_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Settings for how many tokens a model takes; the first that a configuration has counts."""


def build_hugging_face(model: HuggingFaceModel, device: str) -> Built:
    """Make the model on a device, ``meta`` for one without memory, with example inputs and labels.

    Raises:
        UsageError: ``transformers`` is not installed, there is no such type, file, class or setting, or the
            configuration can't be used.
    """
    transformers = import_transformers()
    config = read_config(transformers, model)
    _prepare_training(config, parse_settings(model.settings))
    model_class = find_model_class(transformers, config, model.architecture)
    dtype = _dtype(config, model.dtype)
    with _as_usage_error(model_class), torch.device(device), _default_dtype(dtype):
        module = model_class(config)
    return Built(module.train(), (), _inputs(module, config, model, dtype, device))


def build_pretrained(model: HuggingFaceModel) -> nn.Module:
    """Make the model without memory, with its configuration as it is, for what ``from_pretrained`` reads.

    Where ``generation_config.json`` lies beside the configuration, the model has it.

    Raises:
        UsageError: as `build_hugging_face`.
    """
    transformers = import_transformers()
    config = read_config(transformers, model)
    model_class = find_model_class(transformers, config, model.architecture)
    with _as_usage_error(model_class), torch.device("meta"):
        module: Any = model_class(config)
        beside = _beside(model, "generation_config.json")
        if beside is not None:
            module.generation_config = transformers.GenerationConfig.from_pretrained(beside)
    return module


def _beside(model: HuggingFaceModel, name: str) -> Path | None:
    """The folder of the model's configuration, if it holds a file of this name."""
    folder = Path(model.place) if model.config_json is None and model.place else None
    folder = model.config_json.parent if model.config_json is not None else folder
    return folder if folder is not None and (folder / name).is_file() else None


@contextmanager
def _as_usage_error(model_class: type[nn.Module]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"{model_class.__name__} can't be made of this configuration: {error_line(error)}"
        ) from error


def _prepare_training(config: Any, settings: Mapping[str, Any]) -> None:
    for name, part in _parts(config):
        if hasattr(part, "use_cache") and f"{name}use_cache" not in settings:
            part.use_cache = False  # for generation only: in training it would travel from stage to stage
    starts = getattr(config, "decoder_start_token_id", None) is not None
    if getattr(config, "is_encoder_decoder", False) and not starts:
        # Labels are shifted behind it, and a type's own defaults don't name it.
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def _parts(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration and those within it, such as of the text beside that of images, each with what is
    written in front of its settings.
    """
    yield name, config
    for inner in config.sub_configs:
        if (part := getattr(config, inner, None)) is not None:
            yield from _parts(part, f"{name}{inner}.")


def _dtype(config: Any, name: str | None) -> torch.dtype:
    if name is not None:
        return DTYPES[name]
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else DTYPES.get(str(own), torch.bfloat16)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _inputs(
    module: Any, config: Any, model: HuggingFaceModel, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Tokens, pixels or a spectrogram of one microbatch, tokens and pixels for a pair of encoders, and
    labels, so that the loss is part of the model.
    """
    kind = module.main_input_name
    name = type(module).__name__
    takes = inspect.signature(module.forward).parameters
    if kind == "pixel_values":
        pixels = _image_shape(config)
        inputs = {kind: torch.zeros(model.batch, *pixels, dtype=dtype, device=device)}
    elif kind == "input_ids":
        length = _sequence(config, model.sequence, model.longest)
        inputs = {kind: torch.zeros(model.batch, length, dtype=torch.long, device=device)}
    elif kind == "input_features" and _hears_spectrograms(config) and "labels" in takes:
        spectrogram = _spectrogram_shape(config)
        inputs = {kind: torch.zeros(model.batch, *spectrogram, dtype=dtype, device=device)}
    else:
        raise UsageError(f"{name} takes {kind}: write a function that returns (model, args, kwargs)")
    if kind == "input_ids" and "pixel_values" in takes and _encodes_images_apart(config):
        pixels = _image_shape(config.vision_config)
        inputs["pixel_values"] = torch.zeros(model.batch, *pixels, dtype=dtype, device=device)
        return inputs | ({"return_loss": True} if "return_loss" in takes else {})
    if "labels" in takes:
        shape: tuple[int, ...] = inputs[kind].shape
        if name.endswith(_OF_WHOLE_SAMPLES):
            shape = shape[:1]
        elif kind == "input_features":  # what is said, and not what is heard
            shape = (*shape[:1], _sequence(config, model.sequence, model.longest))
        inputs["labels"] = torch.zeros(shape, dtype=torch.long, device=device)
    elif name.endswith("ForQuestionAnswering"):
        for end in ("start_positions", "end_positions"):
            inputs[end] = torch.zeros(model.batch, dtype=torch.long, device=device)
    return inputs


def _encodes_images_apart(config: Any) -> bool:
    """Whether images go into an encoder beside that of the text, and not in between the tokens."""
    within = ("image_token_index", "image_token_id")
    parts = ("text_config", "vision_config")
    return all(hasattr(config, name) for name in parts) and not any(hasattr(config, name) for name in within)


def _image_shape(config: Any) -> tuple[int, int, int]:
    if not hasattr(config, "image_size"):
        config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def _hears_spectrograms(config: Any) -> bool:
    """Whether this is a model of Whisper's kind, whose first layers make one position of two frames."""
    return all(hasattr(config, name) for name in ("num_mel_bins", "max_source_positions"))


def _spectrogram_shape(config: Any) -> tuple[int, int]:
    return config.num_mel_bins, 2 * config.max_source_positions


def _sequence(config: Any, sequence: int | None, most: int) -> int:
    text = config.get_text_config()
    setting = next((name for name in _LONGEST if getattr(text, name, None)), _LONGEST[0])
    longest = getattr(text, setting, None)
    if not isinstance(longest, int) or longest < 1:
        return most if sequence is None else sequence
    if sequence is None:
        return min(longest, most)
    if sequence > longest:
        raise UsageError(
            f"--sequence is {sequence}, more than the {longest} positions of the model: give at most as "
            f"many, or --set {setting}={sequence}"
        )
    return sequence
