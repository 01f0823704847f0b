"""Bad input: an error that names the node and the next step, and nothing given is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.splitter.graphs import by_name, graph_of, in_runs, snapshot
from tests.splitter.models import Net, exported, traced
from torch import nn
from torch.fx import Graph, GraphModule, Node

import partita
from partita.errors import AssignmentError, GraphError, OrderConflict, PartitaError, RegionError, SplitError
from partita.splitter import split_module

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def two_nodes() -> GraphModule:
    return graph_of(lambda g, x: g.call_function(torch.cos, (g.call_function(torch.sin, (x,)),)))


@pytest.fixture
def gm() -> Iterator[GraphModule]:
    """A graph that must look the same after the test."""
    module = two_nodes()
    before = snapshot(module)
    yield module
    assert snapshot(module) == before


def test_a_node_without_a_key_is_named(gm: GraphModule) -> None:
    with pytest.raises(AssignmentError, match=r"no key for 'cos': give every node a key"):
        partita.split(gm, {"sin": 0})


def test_many_nodes_without_a_key_are_counted() -> None:
    gm = traced(Net(), ())
    with pytest.raises(AssignmentError, match=r"no key for 'blocks_0_linear', .* and \d+ more"):
        partita.split(gm, {})


def test_an_unknown_name_is_named(gm: GraphModule) -> None:
    with pytest.raises(
        AssignmentError, match=r"names 'tan', which the graph does not have: use the names of graph.nodes"
    ):
        partita.split(gm, {"sin": 0, "cos": 0, "tan": 1})


def test_a_node_of_another_graph_is_named(gm: GraphModule) -> None:
    other = two_nodes()
    with pytest.raises(AssignmentError, match=r"names 'x', 'sin', .*which the graph does not have"):
        partita.split(gm, dict.fromkeys(other.graph.nodes, 0))


@pytest.mark.parametrize("key", [[0], {}, {0}])
def test_a_key_that_can_not_be_hashed_is_shown(gm: GraphModule, key: Any) -> None:
    with pytest.raises(
        AssignmentError, match=r"for node 'sin', a (list|dict|set), which can't be hashed: return an int"
    ):
        partita.split(gm, lambda node: key)


def test_no_key_at_all_is_an_error(gm: GraphModule) -> None:
    with pytest.raises(AssignmentError, match=r"returns None for node 'sin': return a key"):
        partita.split(gm, lambda node: None)


def test_a_key_in_a_mapping_must_be_a_node_or_a_name(gm: GraphModule) -> None:
    with pytest.raises(AssignmentError, match=r"maps nodes or node names to keys, got 3 of type int"):
        partita.split(gm, {3: 0})  # type: ignore[dict-item]


def test_an_assignment_must_be_callable_or_a_mapping(gm: GraphModule) -> None:
    with pytest.raises(AssignmentError, match=r"a function or a mapping, got int"):
        partita.split(gm, 3)  # type: ignore[arg-type]


def test_the_error_of_a_callback_comes_through(gm: GraphModule) -> None:
    for cut in (lambda: partita.split(gm, by_name({})), lambda: split_module(gm, None, by_name({}))):
        with pytest.raises(KeyError, match="sin"):
            cut()


def test_options_are_checked(gm: GraphModule) -> None:
    with pytest.raises(SplitError, match=r"on_conflict is 'error' or 'repair', got 'fix'"):
        partita.split(gm, {}, on_conflict="fix")  # type: ignore[arg-type]
    with pytest.raises(SplitError, match=r"shared is 'replicate', 'transmit' or 'root', got 'both'"):
        partita.split(gm, {}, shared="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cut", [lambda m: partita.split(m, {}), lambda m: split_module(m, None, lambda node: 0)]
)
def test_only_a_graph_module_can_be_cut(cut: Any) -> None:
    with pytest.raises(
        GraphError, match=r"takes a torch.fx.GraphModule, got Linear: capture the model first"
    ):
        cut(nn.Linear(1, 1))


def out_of_order() -> Graph:
    graph = two_nodes().graph
    sin, cos = (next(node for node in graph.nodes if node.name == name) for name in ("sin", "cos"))
    cos.append(sin)
    return graph


def erased_operand() -> Graph:
    graph = two_nodes().graph
    foreign = next(node for node in two_nodes().graph.nodes if node.name == "sin")
    next(node for node in graph.nodes if node.name == "cos").args = (foreign,)
    return graph


def same_name() -> Graph:
    graph = two_nodes().graph
    next(node for node in graph.nodes if node.name == "cos").name = "sin"
    return graph


def no_output() -> Graph:
    graph = Graph()
    graph.placeholder("x")
    return graph


def behind_the_output() -> Graph:
    graph = two_nodes().graph
    sin = next(node for node in graph.nodes if node.name == "sin")
    graph.call_function(torch.tan, (sin,))
    return graph


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (out_of_order, r"node 'cos' uses 'sin', which does not stand before it"),
        (erased_operand, r"node 'cos' uses 'sin', which is not in the graph \(erased, or of another graph\)"),
        (same_name, r"two nodes are called 'sin'"),
        (no_output, r"does not end in an output node: add one"),
        (behind_the_output, r"does not end in an output node|stands behind the output"),
    ],
)
def test_a_graph_that_fails_lint_is_refused(build: Any, message: str) -> None:
    gm = two_nodes()
    gm._graph = build()
    before = snapshot(gm)
    for cut in (lambda: partita.split(gm, lambda node: 0), lambda: split_module(gm, None, lambda node: 0)):
        with pytest.raises(GraphError, match=message):
            cut()
    assert snapshot(gm) == before


@pytest.mark.parametrize("kind", ["get_attr", "call_module"])
def test_a_missing_attribute_is_named(kind: str) -> None:
    root = nn.Module()
    root.part = nn.Module()
    root.part.w = nn.Linear(2, 2) if kind == "call_module" else nn.Parameter(torch.ones(2))

    def build(g: Any, x: Any) -> Any:
        value = g.get_attr("part.w") if kind == "get_attr" else g.call_module("part.w", (x,))
        return g.call_function(torch.add, (x, value))

    gm = graph_of(build, root=root)
    del gm.part.w
    before = snapshot(gm)
    for cut in (lambda: partita.split(gm, lambda node: 0), lambda: split_module(gm, None, lambda node: 0)):
        with pytest.raises(
            GraphError,
            match=r"node 'part_w' refers to 'part.w', but Module has no attribute 'w': set it on the module",
        ):
            cut()
    assert snapshot(gm) == before


def test_an_autocast_region_that_never_ends_is_refused() -> None:
    def build(g: Any, x: Any) -> Any:
        g.call_function(enter_autocast, ("cpu", torch.bfloat16, True, True))
        return g.call_function(torch.mm, (x, x))

    gm = graph_of(build)
    before = snapshot(gm)
    for cut in (lambda: partita.split(gm, lambda node: 0), lambda: split_module(gm, None, lambda node: 0)):
        with pytest.raises(
            RegionError, match=r"enters '_enter_autocast' and never leaves: add the matching exit"
        ):
            cut()
    assert snapshot(gm) == before


def test_a_conflict_changes_nothing() -> None:
    def build(g: Any, x: Any) -> Any:
        first = g.call_function(torch.sin, (x,), name="first")
        return g.call_function(
            torch.neg, (g.call_function(torch.cos, (first,), name="second"),), name="third"
        )

    gm = graph_of(build)
    before = snapshot(gm)
    with pytest.raises(OrderConflict, match='pass on_conflict="repair"'):
        partita.split(gm, {"first": 0, "second": 1, "third": 0})
    assert snapshot(gm) == before


@pytest.mark.parametrize("capture", [traced, exported])
def test_a_cut_and_a_run_change_nothing_but_what_the_model_changes(capture: Any) -> None:
    torch.manual_seed(0)
    gm = capture(Net(), (torch.randn(3, 4),))
    before = snapshot(gm)
    keys = in_runs(gm, 3)
    calls: list[Node] = []
    cut = partita.split(gm, keys)
    split_module(gm, None, lambda node: calls.append(node) or keys[node.name])
    assert snapshot(gm) == before
    for piece in cut.pieces:
        piece.module.graph.eliminate_dead_code()
        piece.module.recompile()
        for node in piece.module.graph.nodes:
            node.meta["mine"] = True
    for node in cut.module.graph.nodes:
        node.meta["mine"] = True
    cut.module.meta["mine"] = True
    assert snapshot(gm) == before


def test_every_error_is_of_one_tree() -> None:
    assert all(
        issubclass(kind, PartitaError) and issubclass(kind, ValueError)
        for kind in (AssignmentError, GraphError, OrderConflict, RegionError)
    )
