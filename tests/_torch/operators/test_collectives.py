"""Calls of other ranks are told before they are made."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from partita._torch.operators.collectives import before_collectives, collectives_in


def test_a_sum_over_ranks_is_told_and_arithmetic_is_not() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    value, names = torch.ones(2), list[str]()
    try:
        with before_collectives(names.append):
            value *= 2
            assert not names
            dist.all_reduce(value)
    finally:
        dist.destroy_process_group()
    assert names == ["c10d::allreduce_"]


def test_the_ranks_that_a_graph_calls() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    all_reduce = torch.ops._c10d_functional.all_reduce.default
    calls = [graph.call_function(all_reduce, (x, "sum", group)) for group in ("0", "no such group")]
    graph.output((graph.call_function(torch.add, (x, 1)), *calls))
    gm = GraphModule(torch.nn.Module(), graph)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        calls[0].args = (x, "sum", dist.group.WORLD.group_name)
        assert list(collectives_in(gm)) == [("all_reduce", [0])]
    finally:
        dist.destroy_process_group()
