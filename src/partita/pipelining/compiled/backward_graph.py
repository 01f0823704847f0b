"""Backward graphs, and copies of them to be changed."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import LazyGraphModule, lazy_module
from partita.splitter.building.install import attributes_of, install

__all__ = ["copied", "gradients_of"]


def copied(gm: GraphModule) -> LazyGraphModule:
    """A module with a copy of the graph, and the same attributes."""
    module = lazy_module(copy_graph(gm.graph), type(gm).__name__, training=gm.training)
    install(module, attributes_of(gm, gm.graph.nodes))
    module.meta = dict(gm.meta)
    return module


def gradients_of(gm: GraphModule) -> tuple[Any, ...]:
    """What a backward graph returns: nodes, None, or numbers."""
    (values,) = gm.graph.output_node().args
    return tuple(values)  # type: ignore[arg-type]
