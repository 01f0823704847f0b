"""Imported where rows are forked from: imports what they need, and compiles a small pipeline once."""

from __future__ import annotations

import warnings

import torch
from tools.models.cuts import Cuts
from tools.models.torchvision_stub import prepare_torchvision
from torch import nn

prepare_torchvision()
warnings.simplefilter("ignore")
torch.set_num_threads(1)

import transformers  # noqa: E402

_ = transformers.LlamaForCausalLM, transformers.ViTForImageClassification


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


Cuts(_Small(), {"x": torch.randn(2, 4)}, 4, for_training=True).compare_compiled_steps(
    {"x": torch.randn(8, 4)}
)
torch.compiler.reset()
