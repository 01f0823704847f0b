"""The models of the benchmarks of data parallel training: blocks that are all equal.

Batches are large enough for the processor time of the transfers (some 20 ms a step between two hosts) to be
a few hundredths of that of computing, as it is where a network card does the work. GELU rather than ReLU:
Inductor's ReLU on CPUs is ten times slower than that of eager mode when it keeps a mask for the backward
pass (torch 2.13), and a comparison with eager mode would be one of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Blocks", "Sizes", "make_model", "own_code", "with_own_code"]


@dataclass(frozen=True)
class Sizes:
    """How large a model and its batch are.

    Attributes:
        kind: ``mlp`` or ``transformer``.
        rows: of a batch, for each rank.
        tokens: of a row; 1 for the MLP.
    """

    kind: str
    blocks: int
    width: int
    rows: int
    tokens: int = 1

    def batch(self, seed: int) -> torch.Tensor:
        """Draw a batch; float32, (rows, width) or (rows, tokens, width)."""
        shape = (self.rows, self.width) if self.kind == "mlp" else (self.rows, self.tokens, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MODELS = {
    "mlp": Sizes("mlp", blocks=12, width=768, rows=2048),
    "transformer": Sizes("transformer", blocks=4, width=384, rows=32, tokens=64),
    "tiny": Sizes("mlp", blocks=3, width=64, rows=8),
}


class Blocks(nn.Module):
    """Equal blocks, one after the other; ``block`` makes one."""

    def __init__(self, count: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_model(sizes: Sizes) -> Blocks:
    """Make a model, the same on every rank, with a ``forward`` of its own.

    Dynamo keeps what it has compiled by code: else one way of training would run the graphs of another.
    """
    torch.manual_seed(0)
    return with_own_code(Blocks)(sizes.blocks, partial(_block, sizes))


def with_own_code(kind: Any) -> Any:
    """Derive a class whose ``forward`` has code of its own."""
    return type(kind.__name__, (kind,), {"forward": own_code(kind.forward)})


def own_code(function: Any) -> Any:
    """Copy a function: Dynamo keeps what it has compiled by code, so equal code would share graphs."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _block(sizes: Sizes) -> nn.Module:
    if sizes.kind == "mlp":
        return nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.GELU())
    return nn.TransformerEncoderLayer(
        sizes.width, 6, 4 * sizes.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
