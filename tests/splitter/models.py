"""Models that hold every kind of state, and ways to capture them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("offset", torch.arange(width).float(), persistent=False)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale + self.offset - self.mean


class Net(nn.Module):
    """Two blocks, one of them called twice, a nested one, batch norm, a tied parameter, a side write to a
    buffer.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.tied = self.head.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.steps.add_(1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.blocks[0](x))
        return self.head(x) * scale + x @ self.tied


def traced(model: nn.Module, _args: tuple[Any, ...]) -> GraphModule:
    return torch.fx.symbolic_trace(model)


def exported(model: nn.Module, args: tuple[Any, ...]) -> GraphModule:
    return torch.export.export(model, args).module()


def exported_strictly(model: nn.Module, args: tuple[Any, ...]) -> GraphModule:
    return torch.export.export(model, args, strict=True).module()


def from_dynamo(model: nn.Module, args: tuple[Any, ...]) -> GraphModule:
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    torch._dynamo.reset()
    return graphs[0]
