"""Small graphs, and ways to say which node goes where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


class NamedGraph(Graph):
    """A graph whose ``call_*`` methods take the name of the node."""

    def call_function(
        self, target: Any, args: Any = (), kwargs: Any = None, type_expr: Any = None, name: str | None = None
    ) -> Node:
        return self.create_node("call_function", target, args, kwargs, name, type_expr)

    def call_method(
        self, target: str, args: Any = (), kwargs: Any = None, type_expr: Any = None, name: str | None = None
    ) -> Node:
        return self.create_node("call_method", target, args, kwargs, name, type_expr)


def graph_of(build: Callable[..., Any], inputs: tuple[str, ...] = ("x",), root: Any = None) -> GraphModule:
    """A graph module from a function that adds nodes to a graph and returns the output."""
    graph = NamedGraph()
    graph.output(build(graph, *map(graph.placeholder, inputs)))
    return GraphModule({} if root is None else root, graph)


def by_name(keys: dict[str, Any]) -> Callable[[Node], Any]:
    return lambda node: keys[node.name]


class callback:  # noqa: N801  (stands for a function)
    """An assignment that counts its calls."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys = keys
        self.calls: Counter[str] = Counter()

    def __call__(self, node: Node) -> Any:
        self.calls[node.name] += 1
        return self.keys[node.name]


def module_names(gm: GraphModule) -> list[str]:
    """The modules that a graph calls, in order."""
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


def assignable(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def in_runs(gm: GraphModule, length: int) -> dict[str, int]:
    """Pieces of ``length`` nodes each, in order."""
    return {node.name: number // length for number, node in enumerate(assignable(gm))}


def snapshot(gm: GraphModule) -> list[tuple[Any, ...]]:
    """All that can be changed about a graph, attributes on its nodes and the identity of its metadata's
    values included.
    """
    rows: list[tuple[Any, ...]] = []
    for node in gm.graph.nodes:
        meta = {key: id(value) for key, value in node.meta.items()}
        extra = (
            {key: id(value) for key, value in vars(node).items() if key != "meta"}
            if hasattr(node, "__dict__")
            else {}
        )
        rows.append(
            (
                id(node),
                node.name,
                node.op,
                node.target,
                str(node.args),
                str(node.kwargs),
                tuple(node.users),
                meta,
                extra,
            )
        )
    state = [
        (name, id(value), value.detach().clone()) for name, value in gm.state_dict(keep_vars=True).items()
    ]
    modules = [
        (name, id(module), module.training, sorted(vars(module))) for name, module in gm.named_modules()
    ]
    return [*rows, (str(state), str(modules), str(gm.meta), torch.is_grad_enabled())]
