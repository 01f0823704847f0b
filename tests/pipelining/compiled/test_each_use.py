"""Uses of a value through nodes that return it as it is."""

from __future__ import annotations

import torch
from torch import nn

from partita.pipelining import pipeline
from partita.pipelining.compiled.each_use import repeat_what_changes_nothing


class Converts(nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        same = x.float().to(x.device)
        copied, changed = x.to(torch.float32, copy=True), x.double()
        return same * same + same.exp() + copied + copied + changed + changed + other.float()


def test_each_use_goes_through_a_conversion_of_its_own_that_changes_nothing() -> None:
    x = torch.ones(2, 2)
    graph = pipeline(Converts(), (x, x), split_spec={}).get_stage_module(0).graph
    repeat_what_changes_nothing(graph, {"x"})
    graph.lint()
    converted = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    # three that change nothing, twice; the copy, the other dtype, and that of what nobody shares
    assert sum(name.startswith("aten.to.") for name in converted) == 9
