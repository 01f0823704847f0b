"""The structural hash: equal for what is equal, different for what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

import partita
from partita.graph.structure import structural_hash

UNARY = (torch.sin, torch.cos, torch.relu, torch.ops.aten.neg.default)
Step = tuple[int, int, int, float]


def build(steps: list[Step], prefix: str = "n", output: int = -1, values: float = 0.0) -> GraphModule:
    """A graph of operators on earlier values, constants, parameters and submodules; ``prefix`` goes into
    every name.
    """
    root = nn.Module()
    graph = Graph()
    nodes = [graph.placeholder(f"{prefix}_x"), graph.placeholder(f"{prefix}_y")]
    for number, (kind, first, second, constant) in enumerate(steps):
        left, right = nodes[first % len(nodes)], nodes[second % len(nodes)]
        name = f"{prefix}_{number}"
        if kind < 4:
            node = graph.create_node("call_function", UNARY[kind], (left,), {}, name)
        elif kind == 4:
            node = graph.create_node("call_function", torch.add, (left, right), {"alpha": constant}, name)
        elif kind == 5:
            node = graph.create_node("call_method", "mul", (left, constant), {}, name)
        elif kind == 6:
            setattr(root, f"{prefix}_w{number}", nn.Parameter(torch.full((2, 1 + second % 3), values)))
            node = graph.create_node("get_attr", f"{prefix}_w{number}", name=name)
        else:
            setattr(root, f"{prefix}_m{number}", nn.Linear(2, 1 + second % 3))
            node = graph.create_node("call_module", f"{prefix}_m{number}", (left,), {}, name)
        nodes.append(node)
    graph.output((nodes[output], nodes[0]))
    return GraphModule(root, graph)


def hashed(gm: GraphModule) -> str:
    return structural_hash(gm.graph, gm)


STEP = st.tuples(st.integers(0, 7), st.integers(0, 20), st.integers(0, 20), st.sampled_from([0.5, 1.0, 2.0]))
STEPS = st.lists(STEP, min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_names_and_numbers_in_parameters_do_not_count(steps: list[Step]) -> None:
    first = build(steps, "a", values=0.0)
    assert hashed(first) == hashed(build(steps, "other", values=3.0)) == hashed(copy.deepcopy(first))


@settings(max_examples=120, deadline=None)
@given(STEPS, STEPS)
def test_equal_hashes_mean_equal_programs(first: list[Step], second: list[Step]) -> None:
    def program(steps: list[Step]) -> list[Any]:
        lines = []
        for count, (kind, left, right, constant) in enumerate(steps, start=2):
            left, right = left % count, right % count if kind == 4 else right % 3
            uses = {4: (left, right, constant), 5: (left, constant), 6: (right,), 7: (left, right)}.get(
                kind, (left,)
            )
            lines.append((kind, *uses))
        return lines

    assert (hashed(build(first)) == hashed(build(second))) == (program(first) == program(second))


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 7), st.data())
def test_one_changed_step_changes_the_hash(steps: list[Step], kind: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(steps) - 1))
    changed = [*steps]
    changed[position] = ((changed[position][0] + 1 + kind) % 8, *changed[position][1:])
    assert (hashed(build(steps)) == hashed(build(changed))) == (steps[position][0] == changed[position][0])


def test_the_output_counts() -> None:
    steps: list[Step] = [(0, 0, 0, 1.0), (1, 0, 0, 1.0)]
    assert hashed(build(steps, output=-1)) != hashed(build(steps, output=-2))


def graph_with(
    example: Any = None, target: Any = torch.sin, args: tuple[Any, ...] = (), kwargs: Any = None
) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    if example is not None:
        x.meta["val"] = example
    graph.output(graph.call_function(target, (x, *args), kwargs or {}))
    return GraphModule({}, graph)


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(2, 3),
        torch.empty(3, 2, dtype=torch.float64),
        torch.empty(3, 2, device="meta"),
        torch.empty(2, 3).t(),
        torch.empty(3, 2, requires_grad=True),
        (torch.empty(3, 2),),
        3,
    ],
)
def test_what_is_known_of_a_value_counts(other: Any) -> None:
    assert hashed(graph_with(torch.empty(3, 2))) == hashed(graph_with(torch.ones(3, 2)))
    assert hashed(graph_with(torch.empty(3, 2))) != hashed(graph_with(other))
    assert hashed(graph_with(torch.empty(3, 2))) != hashed(graph_with())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1,), (1.0,)),
        ((1,), (True,)),
        ((0.0,), (-0.0,)),
        (("a",), ("b",)),
        (([1, 2],), ((1, 2),)),
        ((slice(0, 1),), (slice(0, 2),)),
        ((torch.float32,), (torch.float64,)),
        (({"a": 1},), ({"b": 1},)),
        ((None,), ()),
    ],
)
def test_constants_and_their_types_count(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert hashed(graph_with(args=first)) == hashed(graph_with(args=first))
    assert hashed(graph_with(args=first)) != hashed(graph_with(args=second))


def test_keyword_arguments_count_but_not_their_order() -> None:
    assert hashed(graph_with(kwargs={"a": 1, "b": 2})) == hashed(graph_with(kwargs={"b": 2, "a": 1}))
    assert hashed(graph_with(kwargs={"a": 1})) != hashed(graph_with(kwargs={"b": 1}))


def test_a_function_without_a_name_is_equal_to_itself_only() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    def make(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * factor

    assert hashed(graph_with(target=local)) == hashed(graph_with(target=local))
    assert hashed(graph_with(target=make(1))) != hashed(graph_with(target=make(2)))


def module_graph(module: nn.Module) -> GraphModule:
    root = nn.Module()
    root.part = module
    graph = Graph()
    graph.output(graph.call_module("part", (graph.placeholder("x"),)))
    return GraphModule(root, graph)


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Linear(2, 2, bias=False),
        lambda: nn.Linear(2, 2).double(),
        lambda: nn.Linear(2, 2).eval(),
        lambda: nn.Linear(2, 2).requires_grad_(False),
        lambda: nn.Sequential(nn.Linear(2, 2)),
        lambda: nn.Dropout(0.5),
    ],
)
def test_called_modules_are_compared_by_what_they_hold(other: Callable[[], nn.Module]) -> None:
    assert hashed(module_graph(nn.Linear(2, 2))) == hashed(module_graph(nn.Linear(2, 2)))
    assert hashed(module_graph(nn.Linear(2, 2))) != hashed(module_graph(other()))


def test_settings_of_a_module_count() -> None:
    class Scale(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    assert hashed(module_graph(nn.Dropout(0.5))) != hashed(module_graph(nn.Dropout(0.25)))
    assert hashed(module_graph(Scale(1.0))) == hashed(module_graph(Scale(1.0)))
    assert hashed(module_graph(Scale(1.0))) != hashed(module_graph(Scale(2.0)))


def test_tied_parameters_count() -> None:
    def pair(tied: bool) -> GraphModule:
        root = nn.Module()
        root.a = nn.Parameter(torch.ones(2))
        root.b = root.a if tied else nn.Parameter(torch.ones(2))
        graph = Graph()
        graph.output(graph.call_function(torch.add, (graph.get_attr("a"), graph.get_attr("b"))))
        return GraphModule(root, graph)

    assert hashed(pair(True)) == hashed(pair(True))
    assert hashed(pair(True)) != hashed(pair(False))


def test_the_values_of_constants_count() -> None:
    def held(value: Any) -> GraphModule:
        root = nn.Module()
        root.c = value
        graph = Graph()
        graph.output(graph.call_function(torch.add, (graph.placeholder("x"), graph.get_attr("c"))))
        return GraphModule(root, graph)

    def constant(number: float) -> GraphModule:
        gm = held(nn.Parameter(torch.zeros(2)))
        del gm.c
        gm.c = torch.full((2,), number)  # neither parameter nor buffer
        return gm

    assert hashed(constant(1.0)) == hashed(constant(1.0))
    assert hashed(constant(1.0)) != hashed(constant(2.0))


def test_symbols_are_compared_by_where_they_come_from() -> None:
    def capture(first: int, second: int) -> GraphModule:
        graphs: list[GraphModule] = []

        def backend(gm: GraphModule, _inputs: list[Any]) -> Any:
            graphs.append(gm)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(lambda x, y: (x.sin(), y.cos()), backend=backend, dynamic=True)(
            torch.ones(first, second), torch.ones(second, first)
        )
        torch._dynamo.reset()
        return graphs[0]

    assert hashed(capture(3, 4)) == hashed(capture(5, 6))
    assert hashed(capture(3, 4)) != hashed(capture(3, 3))


def test_equal_blocks_of_a_model_give_equal_pieces() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.norm(x) @ self.w)

    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(4, 4))
    gm = torch.fx.symbolic_trace(model)
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    cut = partita.split(gm, {node: number // 4 for number, node in enumerate(nodes)})
    hashes = [piece.structural_hash for piece in cut.pieces]
    assert len(set(hashes)) == 2
    assert len(set(hashes[:4])) == 1
    gm = torch.export.export(model, (torch.randn(2, 4),)).module()
    names = [node for node in gm.graph.nodes if node.op == "call_function"]
    cut = partita.split(
        gm,
        {
            node: number // 4 if node in names else 0
            for number, node in enumerate(
                [*names, *gm.graph.find_nodes(op="call_module", target="_guards_fn")]
            )
        },
    )
    assert len({piece.structural_hash for piece in cut.pieces[1:4]}) == 1
