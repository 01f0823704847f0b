"""Where a level of torch.func is open in a graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.graph.levels import inside_levels


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.sin)(x.cos()).tan()


def test_a_level_is_open_from_the_node_that_opens_it_to_the_one_before_that_which_closes_it() -> None:
    gm = torch.export.export(Mapped(), (torch.ones(2, 3),)).module()
    assert isinstance(gm, torch.fx.GraphModule)
    names = [node.name for node in gm.graph.nodes]
    inside = {names[position] for position in inside_levels(gm)}
    assert "sin" in inside
    assert not inside & {"cos", "tan", "_vmap_decrement_nesting"}


def test_a_graph_without_levels_has_no_such_place() -> None:
    assert not inside_levels(torch.fx.symbolic_trace(nn.Linear(2, 2)))
