"""In-place operators in a graph mean what torch's generated code makes of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from tests.splitter.graphs import graph_of

from partita.splitter.building.rebinding import make_rebinding_explicit


def arguments(gm: torch.fx.GraphModule, name: str) -> list[str]:
    return [
        argument.name for node in gm.graph.nodes if node.name == name for argument in node.all_input_nodes
    ]


def test_later_uses_of_a_number_see_what_was_added_to_it() -> None:
    def build(graph: Any, x: Any) -> Any:
        a = graph.call_function(operator.mul, (x, 1), name="a")
        b = graph.call_function(operator.iadd, (a, 1), name="b")
        return graph.call_function(operator.add, (a, b), name="c")

    gm = graph_of(build)
    explicit, assignment = make_rebinding_explicit(
        gm, lambda node: "ab".index(node.name) if node.name in "ab" else 2
    )
    assert arguments(explicit, "c") == ["b"]
    assert explicit(3) == gm(3) == 8
    assert assignment == {"a": 0, "b": 1, "c": 2}


def test_setitem_stands_for_its_first_operand() -> None:
    def build(graph: Any, x: Any) -> Any:
        d = graph.call_function(operator.setitem, (x, 0, 1.0), name="d")
        return graph.call_function(torch.sin, (d,), name="e")

    explicit, _ = make_rebinding_explicit(graph_of(build), {"d": 0, "e": 1})
    assert arguments(explicit, "e") == ["x"]


def test_a_tensor_is_changed_in_place_and_its_graph_stays() -> None:
    def build(graph: Any, x: Any) -> Any:
        a = graph.call_function(torch.sin, (x,), name="a")
        graph.call_function(operator.iadd, (a, 1), name="b")
        return graph.call_function(torch.cos, (a,), name="c")

    gm, keys = graph_of(build), {"a": 0, "b": 0, "c": 1}
    explicit, assignment = make_rebinding_explicit(gm, keys)
    assert explicit is gm
    assert assignment is keys
