"""What a graph refers to by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from partita.errors import GraphError
from partita.graph.attributes import attribute, lookup


def _node(target: str) -> tuple[nn.Module, Node]:
    root = nn.Module()
    root.inner = nn.BatchNorm1d(2)
    root.inner.register_buffer("scratch", torch.zeros(1), persistent=False)
    root.constant = torch.ones(1)
    root.number = 3
    node = Graph().create_node("get_attr", target)
    return root, node


@pytest.mark.parametrize(
    ("target", "kind", "persistent"),
    [
        ("inner.weight", "parameter", True),
        ("inner.running_mean", "buffer", True),
        ("inner.scratch", "buffer", False),
        ("constant", "constant", True),
        ("number", "constant", True),
        ("inner", "module", True),
    ],
)
def test_an_attribute_knows_what_it_is(target: str, kind: str, persistent: bool) -> None:
    root, node = _node(target)
    item = attribute(root, node)
    assert (item.kind, item.persistent, item.target) == (kind, persistent, target)
    assert item.value is lookup(root, node)


def test_a_missing_attribute_is_named_with_its_node() -> None:
    root, node = _node("inner.wait")
    with pytest.raises(
        GraphError, match=r"node 'inner_wait' refers to 'inner.wait', but BatchNorm1d has no attribute 'wait'"
    ):
        lookup(root, node)
