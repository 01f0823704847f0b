from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from partita._torch.compile.aot import AotGraph, takes_a_list
from partita._torch.compile.training_graphs import GraphCompiler, compile_training
from partita.pipelining.compiled.backward_graph import copied


def test_the_backward_graph_can_be_compiled_later_and_run_twice() -> None:
    seen: list[Any] = []

    def compile_graph(graph: AotGraph, compiler: GraphCompiler) -> Any:
        seen.append(graph.kind)
        if graph.kind != "backward":
            return compiler(graph)
        compiled: list[Any] = []

        def run(values: list[Any]) -> Any:
            if not compiled:
                compiled.append(compiler(graph))
                seen.append("compiled")
            return compiled[0](values)

        return takes_a_list(run)

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_training(gm, inputs, compile_graph, inner=lambda graph: graph.gm.forward)

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


def test_inductor_takes_a_backward_graph_whose_input_has_no_gradient() -> None:
    """As on a GPU, where it looks at the memory layout of each result."""

    def compile_graph(graph: AotGraph, compiler: GraphCompiler) -> Any:
        return compiler(graph)

    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    layer(x).sin().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with inductor_config.patch(disable_padding_cpu=False):
        backend = partial(compile_training, compile_graph=compile_graph)
        torch.compile(lambda x: layer(x).sin(), backend=backend)(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_a_piece_that_another_process_has_compiled_is_in_inductors_cache_on_disk() -> None:
    """It was looked up by the lines that its nodes came from and by autograd's numbers, too: another stage,
    or another rank, or a second start that had run something before, compiled it again.
    """

    def compile_graph(graph: AotGraph, compiler: GraphCompiler) -> Any:
        if graph.kind != "backward":
            return compiler(graph)
        return compiler(graph.piece(copied(graph.gm)))

    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    def second(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    x = torch.randn(4, requires_grad=True)
    with fresh_cache():
        counters.clear()
        for function in (first, second):
            backend = partial(compile_training, compile_graph=compile_graph)
            torch.compile(function, backend=backend)(x).sum().backward()
    assert counters["inductor"]["fxgraph_cache_miss"] == 2  # forward and backward, once each
    assert counters["inductor"]["fxgraph_cache_hit"] == 2


def test_what_eager_mode_has_drawn_is_not_drawn_again_in_the_backward_pass() -> None:
    """Torch, told to save less than it would (`activation_memory_budget`), draws it anew: wrong gradients."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x.sin(), 0.5).exp()

    def gradient(call: Any) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.ones(16, requires_grad=True)
        call(x).sum().backward()
        assert x.grad is not None
        return x.grad

    def compile_graph(graph: AotGraph, compiler: GraphCompiler) -> Any:
        return compiler(graph)

    backend = partial(compile_training, compile_graph=compile_graph, settings={"fallback_random": True})
    expected = gradient(function)
    with functorch_config.patch(activation_memory_budget=0.0):
        torchs = gradient(torch.compile(function, options={"fallback_random": True}))
        torch.testing.assert_close(gradient(torch.compile(function, backend=backend)), expected)
    assert not torch.allclose(torchs, expected)
