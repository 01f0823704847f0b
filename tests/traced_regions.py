"""Whether Dynamo can trace the autocast regions of a graph."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from partita._torch.autograd.region_switches import ENTER_AUTOCAST, EXIT_AUTOCAST, OpenRegions

__all__ = ["need_traced_regions"]


def need_traced_regions() -> None:
    """Skip the test where torch can't compile a graph with a region of autocast (2.11, whoever made it)."""
    g = Graph()
    x = g.placeholder("x")
    cast = g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, False))
    y = g.call_function(torch.sin, (x,))
    g.call_function(EXIT_AUTOCAST, (cast,))
    g.output(y)
    before = OpenRegions.now()
    try:
        torch.compile(GraphModule(torch.nn.Module(), g), backend="eager")(torch.ones(2))
    except AssertionError as error:
        before.put_back()
        pytest.skip(f"torch {torch.__version__}: {error}")
