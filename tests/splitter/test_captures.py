"""Graphs of every origin, cut in every way, do what they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.splitter.graphs import assignable, by_name, graph_of, in_runs
from tests.splitter.models import Net, exported, exported_strictly, from_dynamo, traced
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

import partita
from partita.splitter import split_module


def check(
    gm: GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = (1, 4),
) -> None:
    """Cut into runs and into interleaved pieces, by both splitters and every policy for shared state."""
    names = [node.name for node in assignable(gm)]
    for length in lengths:
        keys = in_runs(gm, length)
        partita.verify(partita.split(gm, keys), gm, args, kwargs).check()
        partita.verify(partita.split(gm, keys, shared="transmit"), gm, args, kwargs).check()
        partita.verify(split_module(gm, None, by_name(keys)), gm, args, kwargs).check()
    mixed = {name: number % 2 for number, name in enumerate(names)}
    tolerant = {
        "rtol": 1e-5,
        "atol": 1e-6,
    }  # gradients may be summed in another order where nodes are reordered
    partita.verify(partita.split(gm, mixed, on_conflict="repair"), gm, args, kwargs, **tolerant).check()


@pytest.mark.parametrize("capture", [traced, exported, exported_strictly, from_dynamo])
def test_a_model_with_every_kind_of_state(capture: Callable[..., GraphModule]) -> None:
    torch.manual_seed(0)
    args = (torch.randn(3, 4, requires_grad=True),)
    gm = capture(Net(), args)
    if capture is from_dynamo:
        inputs = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
        args = tuple(torch.randn(value.shape, requires_grad=value.requires_grad) for value in inputs)
    check(gm, args)


def test_the_flat_graph_of_an_exported_program() -> None:
    program = torch.export.export(Net().eval(), (torch.randn(3, 4),))
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    args = tuple(torch.randn(value.shape) for value in inputs)
    check(program.graph_module, args)


def test_forward_and_backward_of_a_joint_trace() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            loss = torch.tanh(x @ w).sum()
            return loss, *torch.autograd.grad(loss, [w])

    args = (torch.randn(3, 4), torch.randn(4, 2))
    check(make_fx(step, tracing_mode="fake")(*args), args)


def test_the_graphs_of_aotautograd() -> None:
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    graphs: list[tuple[GraphModule, list[Any]]] = []

    def compiler(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, inputs))
        return make_boxed_func(gm.forward)

    net = traced(Net().train(), ())

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler, bw_compiler=compiler)

    torch._dynamo.reset()
    torch.compile(net, backend=backend)(torch.randn(3, 4)).sum().backward()
    torch._dynamo.reset()
    assert len(graphs) == 2
    for gm, inputs in graphs:
        args = tuple(
            torch.randn(value.shape).to(value.dtype) if isinstance(value, torch.Tensor) else value
            for value in inputs
        )
        check(gm, args)


def test_bodies_of_higher_order_operators_travel_with_their_user() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(x.sum() > 0, lambda v: self.linear(v).sin(), lambda v: self.linear(v).cos(), (x,))
            return torch.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y.relu(),))

    args = (torch.randn(2, 3),)
    for capture in (exported, from_dynamo):
        with torch.no_grad():
            gm = capture(Branches(), args)
        if capture is from_dynamo:
            inputs = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
            args = tuple(torch.randn(value.shape) for value in inputs)
        cut = partita.split(gm, in_runs(gm, 1))
        for piece in cut.pieces:
            bodies = [name for name, child in piece.module.named_children() if isinstance(child, GraphModule)]
            assert len(bodies) == (2 if any(name.startswith("cond") for name in piece.node_names) else 0)
        with torch.no_grad():
            for sign in (1, -1):
                moved = (args[0] * sign, *args[1:])
                partita.verify(cut, gm, moved, backward=False).check()
                partita.verify(
                    split_module(gm, None, by_name(in_runs(gm, 1))), gm, moved, backward=False
                ).check()


def test_symbols_that_a_piece_needs_are_its_inputs() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.view(-1).sin()
        return z.view(x.shape[0], x.shape[1]).cos() + y.new_ones(x.shape[0], 1) * x.shape[1]

    x, y = torch.randn(5, 3), torch.randn(2)
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=True)(x, y)
    torch._dynamo.reset()
    gm = graphs[0]
    sizes = [
        node.name
        for node in gm.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta["example_value"], torch.SymInt)
    ]
    assert sizes
    check(
        gm,
        tuple(
            4 if node.name in sizes else torch.randn(4, 4)
            for node in gm.graph.nodes
            if node.op == "placeholder"
        ),
    )
    cut = partita.split(gm, in_runs(gm, 2))
    for piece in cut.pieces:
        needed = {
            str(symbol)
            for node in piece.module.graph.nodes
            if isinstance(value := node.meta.get("example_value"), torch.Tensor)
            for size in value.shape
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        }
        present = {
            str(node.meta["example_value"])
            for node in piece.module.graph.nodes
            if isinstance(node.meta.get("example_value"), torch.SymInt)
        }
        assert needed <= present
    inputs = {piece.name: piece.inputs for piece in cut.pieces}
    assert inputs == {piece.name: piece.inputs for piece in partita.split(gm, in_runs(gm, 2)).pieces}


def test_exported_dynamic_shapes() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0] * 2, -1).sin().sum(1).repeat(x.shape[0])

    program = torch.export.export(
        Model(), (torch.randn(4, 6),), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},)
    )
    check(program.module(), (torch.randn(7, 6),))


def test_a_graph_by_hand_with_awkward_names() -> None:
    """Nodes called like pieces, an attribute called like a piece, a module called twice, its weight read
    beside it.
    """
    root = nn.Module()
    root.a = nn.Linear(2, 2)
    root.submod_0 = nn.Parameter(torch.ones(2))
    root.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
    graph = Graph()
    x = graph.placeholder("submod_1")
    y = graph.call_module("a", (x,))
    y = graph.call_function(torch.add, (y, graph.get_attr("submod_0")))
    y = graph.create_node("call_module", "a", (y,), name="submod_2")
    y = graph.call_function(
        torch.nn.functional.linear, (y, graph.get_attr("a.weight"), graph.get_attr("a.bias"))
    )
    y = graph.call_module("layers.0.1", (graph.call_module("layers.0.0", (y,)),))
    graph.output(graph.call_function(torch.add, (y, graph.get_attr("layers.0.0.bias"))))
    gm = GraphModule(root, graph)
    before = {name: vars(module).copy() for name, module in gm.named_modules()}
    check(gm, (torch.randn(3, 2),), lengths=(1, 2, 3))
    for name, module in gm.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())


def test_a_parametrised_weight_stays_computed() -> None:
    root = nn.Module()
    root.linear = parametrizations.weight_norm(nn.Linear(2, 2))
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("linear.weight")
    y = graph.call_function(torch.nn.functional.linear, (x, weight))
    graph.output(graph.call_module("linear", (y,)))
    gm = GraphModule(root, graph)
    check(gm, (torch.randn(3, 2),), lengths=(1, 2))
    cut = partita.split(gm, in_runs(gm, 1))
    with torch.no_grad():
        gm.linear.parametrizations.weight.original0.mul_(2)
    x = torch.randn(3, 2)
    assert torch.equal(cut.module(x), gm(x))


def test_constants_and_lists_of_modules_survive() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3.0)  # neither parameter nor buffer

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            first, second = torch.split(x + self.table + torch.tensor([1.0, 2.0, 3.0]), 1)
            return [first, {"both": (second, first, None), "number": 3}]

    gm = torch.fx.symbolic_trace(Model())
    check(gm, (torch.randn(2, 3),), lengths=(1, 2))
    cut = partita.split(gm, in_runs(gm, 1))
    assert set(cut.module.state_dict()) <= {
        f"{piece.name}.{name}" for piece in cut.pieces for name in gm.state_dict()
    }


def test_all_inputs_survive_with_defaults_and_stars() -> None:
    def model(
        x: torch.Tensor, unused: int = 3, *args: torch.Tensor, scale: float = 2.0, **kwargs: torch.Tensor
    ) -> torch.Tensor:
        return torch.sin(x) * 2.0

    gm = torch.fx.symbolic_trace(model)
    for cut in (partita.split(gm, in_runs(gm, 1)).module, split_module(gm, None, by_name(in_runs(gm, 1)))):
        assert [node.target for node in cut.graph.nodes if node.op == "placeholder"] == [
            node.target for node in gm.graph.nodes if node.op == "placeholder"
        ]
        x = torch.randn(2)
        for args, kwargs in (((x,), {}), ((x, 4, x), {}), ((x,), {"unused": 5, "other": x}), ((), {"x": x})):
            partita.verify(cut, gm, args, kwargs).check()


def test_annotations_survive() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, n: int = 2) -> torch.Tensor:
            return torch.sin(x) * n

    gm = torch.fx.symbolic_trace(Model())
    cut = partita.split(gm, in_runs(gm, 1))
    cut.module(torch.ones(1))
    assert type(cut.module).forward.__annotations__ == type(gm).forward.__annotations__
    assert [node.type for node in cut.module.graph.nodes if node.op in ("placeholder", "output")] == [
        node.type for node in gm.graph.nodes if node.op in ("placeholder", "output")
    ]


@pytest.mark.parametrize("output", ["nothing", "input", "constant", "attribute"])
def test_outputs_that_no_piece_makes(output: str) -> None:
    def build(g: Any, x: Any) -> Any:
        g.call_function(torch.sin, (x,))
        return {"nothing": None, "input": (x, x), "constant": {"a": 3}, "attribute": [g.get_attr("w"), x]}[
            output
        ]

    root = nn.Module()
    root.w = nn.Parameter(torch.ones(2))
    gm = graph_of(build, root=root)
    check(gm, (torch.randn(2),), lengths=(1,))


def test_a_graph_without_nodes_to_cut() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x)
    cut = partita.split(gm, {})
    assert cut.pieces == ()
    partita.verify(cut, gm, (torch.ones(1),)).check()
    partita.verify(split_module(gm, None, lambda node: 0), gm, (torch.ones(1),)).check()


def test_inference_mode_and_nested_autocast_regions() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ x
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    z = x @ x.cos()
                y = y @ x
            return y, z, y.float() + z

    args = (torch.randn(3, 3, requires_grad=True),)
    check(from_dynamo(Model(), args), args, lengths=(1, 2, 3))


def test_state_used_by_several_pieces_follows_the_policy() -> None:
    gm = traced(Net(), ())
    keys = in_runs(gm, 3)
    x = torch.randn(3, 4)
    replicated = partita.split(gm, keys, shared="replicate")
    assert any(len(pieces) > 1 for pieces in replicated.report.shared.values())
    transmitted = partita.split(gm, keys, shared="transmit")
    owners = [name for piece in transmitted.pieces for name in piece.parameters if name == "blocks.0.scale"]
    assert owners == ["blocks.0.scale"]
    kept = partita.split(gm, keys, shared="root")
    assert "blocks.0.scale" in dict(kept.module.named_parameters())
    for cut in (replicated, transmitted, kept):
        partita.verify(cut, gm, (x,)).check()
