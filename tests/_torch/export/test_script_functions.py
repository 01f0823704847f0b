from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita
from partita._torch.export.script_functions import script_functions_in_python
from partita.capture import capture

with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):

    @torch.jit.script
    def snake(x: Tensor, alpha: Tensor) -> Tensor:
        return x + (alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)


class Snakes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.alphas = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, alpha in zip(self.layers, self.alphas, strict=True):
            x = snake(layer(x), alpha)
        return x


def test_a_function_that_has_been_optimised_keeps_its_gradients() -> None:
    model, x = Snakes(), torch.randn(3, 4)
    for _ in range(3):
        model(x)
    # TorchScript has formulas of its own for gradients, which differ in the last bit.
    graph = capture(model, (x,), prove="close").module
    assert "detach" not in str(graph.graph)
    partita.verify(graph, model, (torch.randn(3, 4),), rtol=1e-5, atol=1e-6).check()


def test_without_a_tracer_it_is_what_it_was() -> None:
    x, alpha = torch.randn(2, 4), torch.ones(4)
    expected = snake(x, alpha)
    with script_functions_in_python():
        assert torch.equal(snake(x, alpha), expected)
    assert torch.equal(snake(x, alpha=alpha), expected)
