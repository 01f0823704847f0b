"""Wherever a command takes a model: ``FILE.py:NAME``, or a Hugging Face type or configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import tree_map
from partita.cli.models.hugging_face import build_hugging_face, build_pretrained
from partita.cli.models.hugging_face_config import LONGEST_SEQUENCE, HuggingFaceModel
from partita.cli.models.user_file import Built, build_from
from partita.errors import UsageError

__all__ = ["ModelSource", "choose_source"]

_PREFIX = "hf:"


@dataclass(frozen=True)
class ModelSource:
    """A model that was named and not made yet: one of the two.

    Attributes:
        title: for reports.
        file: ``FILE.py:NAME``.
        hugging_face: a type or configuration.
    """

    title: str
    file: str | None = None
    hugging_face: HuggingFaceModel | None = None

    def build(self, device: str) -> Built:
        """Make the model and example arguments of one microbatch, on ``cpu``, ``cuda`` or ``meta``.

        On ``meta`` nothing has memory: the user's function runs where tensors are made there, and what it
        made elsewhere is moved.

        Raises:
            UsageError: the model can't be made; the message says why.
        """
        if self.hugging_face is None and self.file is None:
            raise UsageError("no model is named: write FILE.py:NAME or hf:TYPE")
        if device != "meta":
            return self._built(device)
        with torch.device(device):
            built = self._built(device)
        _forget_memory(built.model)  # such as what torch.normal makes, on the CPU whatever the default device
        args, kwargs = tree_map(_without_memory, (built.args, built.kwargs))
        return Built(built.model, args, kwargs)

    def _built(self, device: str) -> Built:
        if self.hugging_face is not None:
            return build_hugging_face(self.hugging_face, device)
        assert self.file is not None
        return build_from(self.file)

    def names(self) -> nn.Module:
        """Make the model on the meta device, for the names and shapes of its tensors and its configuration.

        Raises:
            UsageError: as `build`.
        """
        if self.hugging_face is not None:
            return build_pretrained(self.hugging_face)
        return self.build("meta").model


def choose_source(
    place: str | None,
    config_json: Path | None = None,
    model_type: str | None = None,
    settings: tuple[str, ...] = (),
    architecture: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    *,
    longest: int = LONGEST_SEQUENCE,
) -> ModelSource:
    """Find out what was named, from options as typed. Nothing is imported or built yet.

    Args:
        place: ``FILE.py:NAME``, ``hf:TYPE``, ``hf:FOLDER``, or None where one of the next two says it.
        config_json: as in `HuggingFaceModel`, and so are the others.

    Raises:
        UsageError: nothing is named, or too much, or options that do not belong to it.
    """
    if place is not None and not place.startswith(_PREFIX):
        options = {
            "--config-json": config_json,
            "--model-type": model_type,
            "--set": settings,
            "--architecture": architecture,
            "--batch": batch,
            "--sequence": sequence,
            "--dtype": dtype,
        }
        for option, value in options.items():
            if value not in (None, ()):
                raise UsageError(
                    f"{option} is for Hugging Face models, and {place} is none: leave it out, or write "
                    f"{_PREFIX}TYPE"
                )
        return ModelSource(place, file=place)
    model = HuggingFaceModel(
        None if place is None else place.removeprefix(_PREFIX),
        config_json,
        model_type,
        settings,
        architecture,
        1 if batch is None else batch,
        sequence,
        dtype,
        longest,
    )
    title = model.place or model.model_type or str(config_json)
    return ModelSource(", ".join([title, *settings]), hugging_face=model)


def _forget_memory(model: nn.Module) -> None:
    """Move what is not on the meta device there; what modules share stays shared."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if tensor.device.type != "meta":
                setattr(module, name, moved.setdefault(id(tensor), _without_memory(tensor)))


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return value
    bare = value.detach().to("meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(bare, requires_grad=value.requires_grad)
    return bare.requires_grad_(value.requires_grad)
