"""The second part: architectures of several libraries, compared on inputs that they were not cut with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tools.models.architecture import Architecture
from tools.models.second.diffusion import DIFFUSION
from tools.models.second.multimodal import MULTIMODAL
from tools.models.second.text import TEXT
from tools.models.second.vision import VISION
from tools.models.second.wrapped import WRAPPED
from torch import nn

__all__ = ["SECOND"]

SMALL = 1e-3


def _livened(architecture: Architecture) -> Architecture:
    """Draw parameters that begin at zero or next to it (last layers, adapters, scales of layers) at random.

    Else most gradients would be zero, and equal whatever happens.
    """

    def make() -> tuple[nn.Module, Any]:
        model, config = architecture.make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.numel() and parameter.abs().max() < SMALL:
                    parameter.normal_(std=0.05)
        return model, config

    return replace(architecture, make=make)


SECOND: tuple[Architecture, ...] = tuple(map(_livened, (*VISION, *DIFFUSION, *MULTIMODAL, *TEXT, *WRAPPED)))
