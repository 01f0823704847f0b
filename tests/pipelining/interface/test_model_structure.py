"""Models that ranks have cut can be compared as text: by their parameters, buffers and calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.nn import functional

from partita.pipelining.interface.model_structure import structure_of

aten = torch.ops.aten


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        self.again = self.inner
        self.register_buffer("step", torch.tensor(0))


def test_parameters_and_buffers_have_a_line_under_each_name() -> None:
    assert structure_of(_Tied()) == (
        "inner.weight: bfloat16[2, 3]",
        "again.weight: bfloat16[2, 3]",
        "step: int64[]",
    )


def _graph(build: Callable[[Graph, Any], Any]) -> GraphModule:
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return GraphModule(nn.Linear(2, 2), graph)


def test_a_graph_has_a_line_for_each_call_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = functional.gelu(self.inner(x), approximate="tanh")
            return (x + y * 0.5).sum((0, -1), keepdim=True)

    model = symbolic_trace(Model())
    assert structure_of(model) == (
        "inner.weight: float32[2, 2]",
        "%2 = inner(%0)",
        "%3 = gelu(%2, 'tanh')",
        "%4 = mul(%1, 0.5)",
        "%5 = add(%3, %4)",
        "%6 = sum(%5, [0, -1], True)",
    )
    assert structure_of(copy.deepcopy(model)) == structure_of(symbolic_trace(Model()))
    assert structure_of(model.to("meta")) == structure_of(symbolic_trace(Model()))


@pytest.mark.parametrize(
    "other",
    [
        lambda graph, x: graph.call_function(aten.sub.Tensor, (x, 2)),
        lambda graph, x: graph.call_function(aten.add.Scalar, (x, 2)),
        lambda graph, x: graph.call_function(aten.add.Tensor, (x, 3)),
        lambda graph, x: graph.call_function(aten.add.Tensor, (x, 2.0)),
        lambda graph, x: graph.call_function(aten.add.Tensor, (2, x)),
        lambda graph, x: graph.call_function(aten.add.Tensor, (x, 2), {"alpha": 1}),
        lambda graph, x: graph.call_function(aten.add.Tensor, (graph.call_function(aten.abs, (x,)), 2)),
    ],
    ids=["operator", "overload", "constant", "type", "order", "keyword", "one more"],
)
def test_models_with_the_same_parameters_and_shapes_differ_by_their_calls(
    other: Callable[[Graph, Any], Any],
) -> None:
    model = _graph(lambda graph, x: graph.call_function(aten.add.Tensor, (x, 2)))
    assert structure_of(model) != structure_of(_graph(other))


def test_neither_devices_nor_names_of_values_nor_the_order_of_keywords_count() -> None:
    def ones(name: str, **settings: Any) -> Callable[[Graph, Any], Any]:
        return lambda graph, x: graph.create_node("call_function", torch.ones_like, (x,), settings, name)

    one = _graph(ones("here", device=torch.device("cpu"), requires_grad=True))
    other = _graph(ones("there", requires_grad=True, device=torch.device("cuda", 1)))
    assert structure_of(one) == structure_of(other)


def test_a_dtype_counts() -> None:
    def cast(dtype: torch.dtype) -> GraphModule:
        return _graph(lambda graph, x: graph.call_function(aten.to.dtype, (x, dtype)))

    assert structure_of(cast(torch.float16)) != structure_of(cast(torch.bfloat16))


def test_which_values_a_call_takes_counts() -> None:
    """Tables that are made for each string of a set come in another order in each process."""

    def tables(order: tuple[str, str]) -> Callable[[Graph, Any], Any]:
        def build(graph: Graph, x: Any) -> Any:
            made_of = {name: graph.call_function(aten.cos, (graph.get_attr(name),)) for name in order}
            return graph.call_function(aten.mul.Tensor, (x, made_of["weight"]))

        return build

    assert structure_of(_graph(tables(("weight", "bias")))) != structure_of(
        _graph(tables(("bias", "weight")))
    )


def test_the_name_of_a_group_is_none_of_a_models() -> None:
    """Ranks of one pipeline may each have a group of their own."""
    all_reduce = torch.ops._c10d_functional.all_reduce.default

    def calls(group: str) -> GraphModule:
        return _graph(lambda graph, x: graph.call_function(all_reduce, (x, "sum", group)))

    assert structure_of(calls("1")) == structure_of(calls("2"))
    assert structure_of(calls("1"))[-1].endswith("(%0, 'sum', _)")
