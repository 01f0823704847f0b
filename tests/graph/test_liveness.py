from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from partita.graph.liveness import Border, borders, tensor_bytes


def _chain(uses: list[list[int]]) -> Graph:
    """A graph whose node number i takes the nodes ``uses[i]``; each is a float32[3]."""
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for number, operands in enumerate(uses):
        nodes.append(
            graph.call_function(max, tuple(nodes[operand] for operand in operands), name=f"n{number}")
        )
    for node in nodes:
        node.meta["val"] = torch.empty(3)
    graph.output(nodes[-1])
    return graph


def _borders(graph: Graph) -> list[Border]:
    nodes = list(graph.nodes)
    return borders(nodes, {node: position for position, node in enumerate(nodes)})


def test_a_skip_is_alive_until_its_last_use() -> None:
    crossing = _borders(_chain([[0], [1], [2, 0]]))
    assert [(border.after, border.tensors, border.bytes) for border in crossing] == [
        (0, 1, 12),
        (1, 2, 24),
        (2, 2, 24),
        (3, 1, 12),
    ]


def test_attributes_and_values_that_nobody_uses_do_not_count() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.create_node("get_attr", "weight")
    graph.call_function(max, (x, x), name="unused")
    graph.output(graph.call_function(max, (x, weight)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    assert [border.tensors for border in _borders(graph)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "value", [(torch.empty(2), torch.empty(2)), 3, None, "text"], ids=["tuple", "int", "None", "str"]
)
def test_what_is_no_tensor_is_counted_apart(value: object) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    graph.output(graph.call_function(max, (x, x)))
    assert _borders(graph)[0] == Border(0, 0, 0, 1)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=10).flatmap(
    lambda sizes: st.tuples(*(st.lists(st.integers(0, i), min_size=1, max_size=3) for i in range(len(sizes))))
))  # fmt: skip
def test_a_border_counts_what_is_made_before_it_and_used_behind(uses: tuple[list[int], ...]) -> None:
    graph = _chain(list(uses))
    nodes = list(graph.nodes)
    for border in _borders(graph):
        before, behind = nodes[: border.after + 1], set(nodes[border.after + 1 :])
        assert border.tensors == sum(any(user in behind for user in node.users) for node in before)


def test_bytes_of_tensors_with_known_sizes_only() -> None:
    assert tensor_bytes(torch.empty(2, 3, dtype=torch.bfloat16)) == 12
    assert tensor_bytes(torch.empty(0)) == 0
    assert tensor_bytes([torch.empty(2)]) is None
