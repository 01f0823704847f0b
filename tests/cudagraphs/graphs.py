"""Graphs of operators with example values on a device that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Builder:
    """Makes a graph node by node; each gets the fake value that its operator returns."""

    def __init__(self) -> None:
        self.graph = Graph()
        shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

    def fake(self, *shape: int, device: Any = CUDA, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, device=device, dtype=dtype)

    def input(self, name: str, value: Any) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(
        self,
        target: Any,
        *args: Any,
        name: str | None = None,
        line: int = 0,
        value: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Node:
        """Append a call. ``value`` is for operators that can't be run on fake tensors."""
        packet = getattr(target, "_overloadpacket", target)
        node = self.graph.create_node("call_function", target, args, kwargs, name or packet.__name__)
        if value is not None:
            node.meta["val"] = value
            return node
        with self.mode:
            values = torch.fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
            node.meta["val"] = None if target is print else target(*values[0], **values[1])
        if line:
            node.meta["stack_trace"] = (
                f'  File "model.py", line {line}, in forward\n    code of line {line}\n'
            )
        return node

    def module(self, *outputs: Node) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(torch.nn.Module(), self.graph)


def build(function: Callable[..., Any], *shape: int, device: torch.device = CUDA) -> GraphModule:
    """A graph with one input ``x``: ``function(builder, x)`` returns its outputs."""
    builder = Builder()
    outputs = function(builder, builder.input("x", builder.fake(*(shape or (4, 4)), device=device)))
    return builder.module(*(outputs if isinstance(outputs, Sequence) else (outputs,)))


def sync(builder: Builder, x: Node, **kwargs: Any) -> Node:
    """A node on the GPU that can't be captured, and that runs on any device: the gradient of an embedding."""
    index = builder.call(aten.zeros_like.default, builder.call(aten.select.int, x, 1, 0), dtype=torch.int64)
    return builder.call(aten.embedding_dense_backward.default, x, index, 4, -1, False, **kwargs)


def random_graph(seed: int) -> Callable[[Builder, Node], list[Node]]:
    """Views, writes, random numbers and nodes that can't be captured, used by whoever comes later."""

    def function(b: Builder, x: Node) -> list[Node]:
        choose = Random(seed)
        values = [x]
        for _ in range(choose.randint(3, 12)):
            first, second = choose.choice(values), choose.choice(values)
            kind = choose.choice(["sin", "add", "write", "draw", "turn", "sync", "sync"])
            if kind == "sin":
                values.append(b.call(aten.sin.default, first))
            elif kind == "add":
                values.append(b.call(aten.add.Tensor, first, second))
            elif kind == "write":
                # of a tensor to itself turned it would be an error
                values.append(b.call(aten.add_.Tensor, first, b.call(aten.mul.Tensor, second, 0.5)))
            elif kind == "draw":
                values.append(b.call(aten.bernoulli.p, first, 0.5))
            elif kind == "turn":
                values.append(b.call(aten.t.default, first))
            else:
                values.append(sync(b, first))
        return values[1:]

    return function
