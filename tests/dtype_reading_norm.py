"""A norm that asks for the dtype of what it is given: a graph of it has the dtype of its trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DtypeReadingNorm"]


class DtypeReadingNorm(nn.Module):
    """Computes in float32 and returns what it was given, as those of language models do; 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        kind, x = x.dtype, x.float()
        return self.weight * (x * x.square().mean(-1, keepdim=True).rsqrt()).to(kind)
