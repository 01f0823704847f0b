"""Which uses of a weight share an entry of autocast's cache."""

from __future__ import annotations

from typing import Any

import torch
from tests.graph.making import graph_of
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.autograd.region_switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from partita.graph.casts import Casts, find_casts
from partita.graph.effects import analyse
from partita.graph.regions import ambient_states


def region(graph: Graph, *uses: tuple[Node, Node]) -> list[Node]:
    """An autocast region with a product for each pair."""
    entered = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, True))
    products = [graph.call_function(torch.mm, pair) for pair in uses]
    graph.call_function(EXIT_AUTOCAST, (entered,))
    return products


def casts_of(gm: GraphModule) -> tuple[Casts, list[str]]:
    effects = analyse(gm)
    runs, _ = ambient_states(effects.nodes, effects.regions)
    starts = [start for start, _ in runs] + [len(effects.nodes)]
    ambients = [state for number, (start, state) in enumerate(runs) for _ in range(start, starts[number + 1])]
    return find_casts(gm, effects, ambients), [node.name for node in effects.nodes]


def test_uses_of_one_weight_in_one_region_share_a_conversion() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2, 2))

    def build(graph: Graph) -> Any:
        x, weight = graph.placeholder("x"), graph.get_attr("weight")
        x.meta["val"] = torch.ones(2, 2)
        first = region(graph, (x, weight), (x, weight))
        second = region(graph, (x, weight))
        return (*first, *second, graph.call_function(torch.mm, (x, weight)))

    casts, names = casts_of(graph_of(build, root))
    assert [[names[position] for position in positions] for positions in casts.shared] == [["mm", "mm_1"]]
    assert casts.regions[names.index("mm")] is not casts.regions[names.index("mm_2")]
    assert casts.regions[names.index("mm_3")] is None


def test_an_input_that_needs_no_gradient_is_not_cached() -> None:
    def build(graph: Graph) -> Any:
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
        return region(graph, (x, y), (x, y))

    casts, names = casts_of(graph_of(build))
    assert [[names[position] for position in positions] for positions in casts.shared] == [["mm", "mm_1"]]
