from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita._torch.aot import compile_ahead, static_placeholders


def test_each_graph_goes_to_its_compiler_and_parameters_are_static() -> None:
    seen: dict[str, Any] = {}

    def compiler(kind: str) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
            names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
            seen[kind] = (
                [names[index] for index in sorted(static_placeholders())] if kind != "backward" else []
            )
            return gm

        return compile_graph

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_ahead(
            gm,
            inputs,
            forward=compiler("forward"),
            backward=compiler("backward"),
            inference=compiler("inference"),
        )

    torch.compiler.reset()
    model = nn.Linear(2, 3)
    compiled = torch.compile(model, backend=backend)
    x = torch.ones(4, 2)
    compiled(x).sum().backward()
    assert torch.equal(model.bias.grad, torch.full((3,), 4.0))
    assert len(seen["forward"]) == 2
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert seen.keys() == {"forward", "backward", "inference"}
    assert len(seen["inference"]) == 2


def test_outside_of_a_compilation_nothing_is_static() -> None:
    assert static_placeholders() == frozenset()
