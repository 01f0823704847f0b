"""Graphs as plain records that can be pickled.

``GraphModule`` pickles the generated source and traces it again when it is loaded. Grad mode and autocast
switches run while that trace is made and are gone from the graph, so a record of the nodes is kept here
instead.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from partita.errors import GraphError

__all__ = ["GraphRecord"]

_KEPT_META = ("stack_trace", "seq_nr")


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands for the node at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class _Operator:
    """Stands for an operator or a memory format, which can't be pickled themselves."""

    name: str
    overload: str | None = None

    def resolve(self) -> Any:
        namespace, _, name = self.name.rpartition("::")
        if namespace == "memory_format":
            return getattr(torch, name)
        home = getattr(torch.ops, namespace)
        if namespace == "higher_order" or self.overload is None:
            return getattr(home, name)
        return getattr(getattr(home, name), self.overload)


@dataclass(frozen=True)
class GraphRecord:
    """All nodes of a graph, as (op, name, target, args, kwargs, type, meta), and how it flattens its
    arguments.

    Metadata that holds fake tensors is left out; stack traces stay.
    """

    rows: tuple[tuple[Any, ...], ...]
    codegen: Any
    tracer_cls: Any

    @classmethod
    def of(cls, graph: Graph) -> GraphRecord:
        """Record ``graph``.

        Raises:
            GraphError: an argument is symbolic, which has no meaning in another process.
        """
        positions = {node: position for position, node in enumerate(graph.nodes)}

        def encoded(node: Node, value: Any) -> Any:
            if isinstance(value, Node):
                return _Reference(positions[value])
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise GraphError(
                    f"node {node.name!r} holds the symbolic value {value}, which can't be pickled: pickle "
                    f"the model before it is captured"
                )
            return _encoded_operator(value)

        def row(node: Node) -> tuple[Any, ...]:
            args, kwargs = (
                map_aggregate(value, partial(encoded, node)) for value in (node.args, node.kwargs)
            )
            meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
            return node.op, node.name, _encoded_operator(node.target), args, kwargs, node.type, meta

        rows = tuple(map(row, graph.nodes))
        tracer = graph._tracer_cls
        return cls(
            rows,
            copy.copy(graph._codegen),
            None if tracer is None or "<locals>" in tracer.__qualname__ else tracer,
        )

    def build(self) -> Graph:
        """Return a graph with these nodes."""
        graph = Graph(tracer_cls=self.tracer_cls)
        graph._codegen = copy.copy(self.codegen)
        nodes: list[Node] = []

        def decoded(value: Any) -> Any:
            return nodes[value.position] if isinstance(value, _Reference) else _decoded_operator(value)

        for kind, name, target, args, kwargs, type_expr, meta in self.rows:
            node = graph.create_node(
                kind,
                _decoded_operator(target),
                map_aggregate(args, decoded),
                map_aggregate(kwargs, decoded),
                name,
                type_expr,
            )
            node.meta.update(meta)
            nodes.append(node)
        return graph


def _encoded_operator(value: Any) -> Any:
    if isinstance(value, torch.memory_format):
        return _Operator(f"memory_format::{str(value).rpartition('.')[2]}")
    if isinstance(value, OpOverload):
        return _Operator(value._schema.name, value._overloadname)
    if isinstance(value, OpOverloadPacket):
        return _Operator(value._qualified_op_name)
    if isinstance(value, HigherOrderOperator):
        return _Operator(f"higher_order::{value.name()}")
    return value


def _decoded_operator(value: Any) -> Any:
    return value.resolve() if isinstance(value, _Operator) else value
