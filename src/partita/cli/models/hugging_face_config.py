"""The configuration of a Hugging Face model, from a type, a file and settings, and the class of the model."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from partita.errors import UsageError

__all__ = [
    "DTYPES",
    "LONGEST_SEQUENCE",
    "HuggingFaceModel",
    "error_line",
    "find_model_class",
    "import_transformers",
    "parse_settings",
    "read_config",
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""Where a class is looked for, in this order; the names are those of ``transformers``."""
LONGEST_SEQUENCE = 4096
_COUNT = re.compile(r"(^|\.)(num|n)_|_size$|^d_")
"""Names of what is counted; transformers takes negative numbers too, and makes a model without layers."""
_WAY_OUT = "give a folder with config.json, --config-json FILE, or a type with --set, such as hf:llama"


@dataclass(frozen=True)
class HuggingFaceModel:
    """What the command line says of a model.

    Attributes:
        place: what stands after ``hf:``, a model type or a folder with ``config.json``; None where one of the
            next two says it.
        config_json: a file with a configuration.
        model_type: such as ``llama``; with a file, in place of the file's.
        settings: ``name=value``, in place of what the configuration says.
        architecture: name of a class of ``transformers``; None for the configuration's first, or the one with
            a loss for language or images.
        batch: samples in a microbatch.
        sequence: tokens in a sample; None for the model's own longest, `longest` at most.
        dtype: ``bfloat16``, ``float16`` or ``float32``; None for the configuration's, or bfloat16.
        longest: tokens in a sample where `sequence` is None and the model allows as many.
    """

    place: str | None = None
    config_json: Path | None = None
    model_type: str | None = None
    settings: tuple[str, ...] = ()
    architecture: str | None = None
    batch: int = 1
    sequence: int | None = None
    dtype: str | None = None
    longest: int = LONGEST_SEQUENCE

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}: give {', '.join(DTYPES)}")
        for option, value in (("--batch", self.batch), ("--sequence", self.sequence)):
            if value is not None and value < 1:
                raise UsageError(f"{option} is {value}: give 1 or more")
        if self.place is None and self.config_json is None and self.model_type is None:
            raise UsageError(f"no model is named: {_WAY_OUT}")
        if self.place is not None and (self.config_json is not None or self.model_type is not None):
            raise UsageError(f"hf:{self.place} is given with --config-json or --model-type: give one of them")
        parse_settings(self.settings)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` texts. Values are JSON where they can be; what is no JSON is text.

    >>> parse_settings(["num_hidden_layers=80", "hidden_act=gelu", "tie_word_embeddings=true"])
    {'num_hidden_layers': 80, 'hidden_act': 'gelu', 'tie_word_embeddings': True}

    Raises:
        UsageError: no name or no ``=``.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {setting!r:.60}: write name=value, such as num_hidden_layers=80")
        try:
            values[name.strip()] = json.loads(value)
        except ValueError:
            values[name.strip()] = value
    return values


def import_transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise UsageError("Hugging Face models need transformers: pip install 'partita[hf]'") from error


def read_config(transformers: ModuleType, model: HuggingFaceModel) -> Any:
    """The configuration, with what was set on the command line."""
    values, model_type = _read_values(transformers, model)
    try:
        default = transformers.AutoConfig.for_model(model_type)
    except Exception as error:
        if model_type in transformers.CONFIG_MAPPING:
            raise UsageError(
                f"transformers can't make the {model_type} configuration: {_cause(error)}"
            ) from error
        raise _no_such_type(transformers, model_type, values.get("architectures")) from error
    settings = parse_settings(model.settings)
    for name in settings:
        first = name.partition(".")[0]
        if first in values or hasattr(default, first):
            continue
        if not _is_read(transformers, default, model.architecture, first):
            public = [attribute for attribute in dir(default) if not attribute.startswith("_")]
            near = difflib.get_close_matches(name, public, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"--set {name}: the {model_type} configuration has no {name!r}{hint}")
    for name, value in settings.items():
        if isinstance(value, int) and value < 0 and _COUNT.search(name):
            raise UsageError(f"--set {name} is {value}: give a number that is not below 0")
        _put(values, name, value)
    try:
        config = transformers.AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise UsageError(f"the {model_type} configuration can't be used: {error_line(error)}") from error
    return config


def _is_read(transformers: ModuleType, config: Any, architecture: str | None, setting: str) -> bool:
    """Whether the code of the model asks for a setting that its configuration's class does not have by
    itself, such as ``head_dim`` of a Qwen3.
    """
    source = inspect.getsource(sys.modules[find_model_class(transformers, config, architecture).__module__])
    return re.search(rf"""config(\.|, ["']){re.escape(setting)}\b""", source) is not None


def _read_values(transformers: ModuleType, model: HuggingFaceModel) -> tuple[dict[str, Any], str]:
    """What a file says, and the model's type."""
    path = model.config_json
    if model.place is not None:
        folder = Path(model.place)
        path = folder / "config.json" if folder.is_dir() else None
        if path is None:
            if model.place not in transformers.CONFIG_MAPPING:
                raise UsageError(
                    f"{model.place!r} is no model type and no folder, and nothing is downloaded"
                    f"{_near_types(transformers, model.place)}: {_WAY_OUT}"
                )
            return {}, model.place
    if path is None:
        return {}, model.model_type or ""
    values = _read_json(path)
    # `auto_map` names code to load from elsewhere.
    for name in ("auto_map", "transformers_version"):
        values.pop(name, None)
    model_type = values.pop("model_type", None)
    model_type = model_type if model.model_type is None else model.model_type
    if not isinstance(model_type, str):
        raise UsageError(f"{path} names no model_type: give it with --model-type")
    return values, model_type


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): {_WAY_OUT}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON ({error}): {_WAY_OUT}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds a {type(values).__name__} and no configuration: {_WAY_OUT}")
    return values


def _no_such_type(transformers: ModuleType, model_type: str, architectures: Any) -> UsageError:
    """The error; of a file whose code is not in transformers, with the type whose classes it names."""
    hint = _near_types(transformers, model_type)
    named = architectures if isinstance(architectures, list) else []
    for name, classes in vars(import_module("transformers.models.auto.modeling_auto")).items():
        if not name.endswith("_MAPPING_NAMES"):
            continue
        types = [one for one, class_name in classes.items() if class_name in named]
        if types:
            hint = f"; its architectures name {classes[types[0]]}, which is that of --model-type {types[0]}"
            break
    return UsageError(
        f"there is no model type {model_type!r} in transformers {transformers.__version__}{hint}"
    )


def _near_types(transformers: ModuleType, name: str) -> str:
    near = difflib.get_close_matches(name, transformers.CONFIG_MAPPING, 3)
    return f"; near are {', '.join(near)}" if near else ""


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a value; ``a.b`` is ``b`` of the dictionary ``a``."""
    first, dot, rest = name.partition(".")
    if not dot:
        values[first] = value
        return
    inner = values.get(first)
    values[first] = dict(inner) if isinstance(inner, Mapping) else {}
    _put(values[first], rest, value)


def find_model_class(transformers: ModuleType, config: Any, architecture: str | None) -> type[nn.Module]:
    """Return the model class of a configuration: ``architecture``, or else the first of the configuration's
    own ``architectures``, or else what transformers has for it, language models before other heads.

    Raises:
        UsageError: there is no such class, or transformers can't import it here.
    """
    try:
        return _imported_class(transformers, config, architecture)
    except (ImportError, RuntimeError) as error:  # what it imports in turn may not fit this torch
        raise UsageError(
            f"transformers can't import its model for a {type(config).__name__}: {_cause(error)}"
        ) from error


def _cause(error: BaseException) -> str:
    """What an error comes from, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error_line(error)


def _imported_class(transformers: ModuleType, config: Any, architecture: str | None) -> type[nn.Module]:
    named = architecture or next(iter(config.architectures or ()), None)
    if named is not None:
        model_class = getattr(transformers, str(named), None)
        if (
            inspect.isclass(model_class)
            and issubclass(model_class, nn.Module)
            and issubclass(model_class, transformers.PreTrainedModel)
        ):
            return model_class
        if architecture is not None:
            raise UsageError(f"--architecture is {architecture!r}: transformers has no such model class")
    for head in _HEADS:
        mapping = getattr(transformers, head)
        if type(config) in mapping:
            choice = mapping[type(config)]
            return choice[0] if isinstance(choice, tuple) else choice
    raise UsageError(
        f"transformers has no model for a {type(config).__name__}: give its class with --architecture"
    )


def error_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
