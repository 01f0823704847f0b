"""Small graphs made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita.graph.effect_rules.node_effect import PURE, NodeEffect
from partita.graph.effects import analyse
from partita.graph.order import order_edges

__all__ = ["edges_of", "effect_of", "graph_of", "names"]


def graph_of(build: Callable[[Graph], Any], root: nn.Module | None = None) -> GraphModule:
    """A graph module from a function that adds nodes and returns what is put out."""
    graph = Graph()
    graph.output(build(graph))
    return GraphModule(root if root is not None else nn.Module(), graph)


def effect_of(
    target: Any, *args: Any, inputs: int = 3, root: nn.Module | None = None, **kwargs: Any
) -> NodeEffect:
    """The effects of one call; strings ``"a"``, ``"b"``, ``"c"`` among its arguments stand for inputs.

    A callable target is called as a function; a text that ends in ``()`` is a method, any other text a
    module.
    """
    graph = Graph()
    inputs_by_name = {letter: graph.placeholder(letter) for letter in "abc"[:inputs]}

    def lower(value: Any) -> Any:
        if isinstance(value, str) and value in inputs_by_name:
            return inputs_by_name[value]
        if isinstance(value, (list, tuple)):
            return type(value)(lower(item) for item in value)
        return value

    op = "call_function" if callable(target) else "call_method" if target.endswith("()") else "call_module"
    name = target if op != "call_method" else target[:-2]
    node = graph.create_node(op, name, lower(args), {key: lower(value) for key, value in kwargs.items()})
    graph.output(node)
    gm = GraphModule(root if root is not None else nn.Module(), graph)
    effects = analyse(gm)
    return effects.by_position.get(len(effects.nodes) - 2, PURE)


def names(operands: tuple[Node, ...]) -> str:
    """Names of nodes, sorted, in one text."""
    return "".join(sorted({node.name for node in operands}))


def edges_of(gm: GraphModule) -> set[tuple[str, str, str]]:
    """Ordering edges as (before, after, resource)."""
    effects = analyse(gm)
    return {
        (effects.nodes[e.before].name, effects.nodes[e.after].name, e.resource) for e in order_edges(effects)
    }
