"""What is marked as a region for compilers is a part of the model like any other."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.export.nested_regions import nested_regions_are_called
from partita.pipelining import pipeline


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    @torch.compiler.nested_compile_region
    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.block(layer, x)
        return x


def test_a_marked_function_is_traced_as_its_own_operators() -> None:
    module: Any = import_module("torch._higher_order_ops.invoke_subgraph")
    before = module.invoke_subgraph_placeholder
    with nested_regions_are_called():
        program = torch.export.export(Blocks(), (torch.ones(1, 2),), strict=False)
    assert module.invoke_subgraph_placeholder is before
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.tanh.default) == 3


def test_a_model_with_marked_functions_is_cut_as_often_as_one_likes() -> None:
    """The second time was a RecursionError: Dynamo had given the regions up while the first was proven."""
    model, x = Blocks(), torch.ones(2, 2)
    for _ in range(2):
        pipe = pipeline(model, (x,), stages=3)
        assert torch.equal(pipe(x), model(x))
