"""What a graph makes follows the device of its stage."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from partita.pipelining.stages.placing.move_graph import move_graph


def test_devices_are_replaced_wherever_they_stand_in_arguments() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(torch.ones, (3,), {"device": torch.device("meta")})
    moved = graph.call_method("to", (ones, torch.device("meta")))
    kept = graph.call_function(torch.ones, (3,), {"device": torch.device("cpu")})
    graph.output((x, moved, kept))
    gm = GraphModule(torch.nn.Module(), graph)
    assert move_graph(gm, torch.device("meta"), torch.device("cpu")) == 2
    assert [value.device.type for value in gm(torch.zeros(1))] == ["cpu"] * 3
    assert move_graph(gm, torch.device("meta"), torch.device("cpu")) == 0


def test_an_index_narrows_what_is_replaced() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.ones, (3,), {"device": torch.device("cuda", 1)}))
    gm = GraphModule(torch.nn.Module(), graph)
    assert move_graph(gm, torch.device("cuda", 0), torch.device("cpu")) == 0
    assert move_graph(gm, torch.device("cuda"), torch.device("cpu")) == 1
