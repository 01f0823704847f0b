"""What is left out of backward graphs before they are compiled."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from partita.pipelining.compiled.backward_graph import leave_out_idle_seeds

_SEED = torch.ops.partita.seed_site.default


def _graph(*, draws_after: int | None) -> GraphModule:
    """Three seeds, one of them before a random call."""
    graph = Graph()
    x = graph.placeholder("x")
    for site in range(3):
        graph.call_function(_SEED, (site,))
        if site == draws_after:
            x = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)),))
    return GraphModule({}, graph)


def test_seeds_of_the_forward_graphs_random_calls_are_left_out() -> None:
    """AOTAutograd keeps them in the backward graph, which draws nothing: each would be a call at each run."""
    gm = _graph(draws_after=None)
    assert not leave_out_idle_seeds(gm)
    assert not gm.graph.find_nodes(op="call_function", target=_SEED)


def test_the_seed_before_a_random_call_stays() -> None:
    gm = _graph(draws_after=1)
    assert leave_out_idle_seeds(gm)
    assert [node.args for node in gm.graph.find_nodes(op="call_function", target=_SEED)] == [(1,)]
