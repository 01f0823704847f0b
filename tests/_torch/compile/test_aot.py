from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita._torch.compile.aot import compile_ahead, forward_returns, static_placeholders


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


def test_what_forward_saves_for_backward_stands_behind_what_it_returns() -> None:
    seen: list[tuple[int | None, int]] = []

    def forward(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append((forward_returns(), len(gm.graph.output_node().args[0])))
        return gm

    def plain(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        return gm

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_ahead(gm, inputs, forward=forward, backward=plain, inference=plain)

    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (x.sin().cos(), x + 1), backend=backend)(x)
    returned, outputs = seen[0]
    assert returned == 2
    assert outputs > 2
    assert forward_returns() is None
