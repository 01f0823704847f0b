"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

import torch

__all__ = ["prepare_torchvision"]

_OPERATORS = ("nms", "qnms")
_DECLARED: list[torch.library.Library] = []
"""What is declared lives as long as this."""


@cache
def prepare_torchvision() -> None:
    """See to it that torchvision, where it is installed, can be imported.

    Its wheels are compiled for one version of torch each; without its operators its Python refuses to be
    imported. None of the table's models calls them, so they are declared and left without an implementation.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
        importlib.import_module("torchvision")
