from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita._torch.compile.training_graphs import compile_training


def test_the_backward_graph_can_be_compiled_later_and_run_twice() -> None:
    seen: list[Any] = []

    def forward(gm: Any) -> None:
        seen.append("forward")

    def backward(gm: Any, examples: Any, pieces: Any) -> Any:
        seen.append("backward")
        compiled: list[Any] = []

        def run(values: list[Any]) -> Any:
            if not compiled:
                compiled.append(pieces(gm))
                seen.append("compiled")
            return compiled[0](values)

        return run

    def backend(gm: Any, inputs: Any) -> Any:
        inner = lambda graph, _inputs: graph.forward  # noqa: E731
        return compile_training(gm, inputs, inner=inner, forward=forward, backward=backward)

    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    layer(x).sin().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    loss = torch.compile(lambda x: layer(x).sin(), backend=backend)(x).sum()
    assert seen == ["forward"]
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == ["forward", "backward", "compiled"]
    torch.testing.assert_close(layer.weight.grad, 2 * expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
