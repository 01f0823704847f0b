from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule

from partita.capture.merging.size_order import order_sizes


def test_numbers_stand_before_their_first_user_and_keep_their_meaning() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    unused = graph.call_function(operator.add, (size, 1))
    twice = graph.call_function(operator.mul, (2, size))
    more = graph.call_function(operator.add, (twice, size))
    total = graph.call_function(torch.ops.aten.sum.default, (x,))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (total, more))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (scaled, twice)),))
    for number in (size, unused, twice, more):
        number.meta["val"] = 3
    gm = GraphModule(torch.nn.Module(), graph)
    before = gm(torch.ones(4))
    order_sizes(gm)
    gm.graph.lint()
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["sym_size_int", "add", "sum_default", "mul", "add_1", "mul_tensor", "add_tensor"]
    assert torch.equal(gm(torch.ones(4))[0], before[0])
