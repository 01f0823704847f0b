"""Backward graphs, and copies of them to be changed."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import LazyGraphModule, lazy_module
from partita.graph.effects import analyse
from partita.splitter.building.install import attributes_of, install

__all__ = ["copied", "gradients_of", "leave_out_idle_seeds"]


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


def leave_out_idle_seeds(gm: GraphModule) -> bool:
    """Leave out, in place, the seeds of random calls that the forward graph alone makes: AOTAutograd has each
    seed, which nobody uses, in both graphs, and a compiler would not fuse across it.

    Returns:
        Whether seeds are left.
    """
    seed = torch.ops.partita.seed_site.default
    if not gm.graph.find_nodes(op="call_function", target=seed):
        return False
    effects = analyse(gm, distinct_inputs=True)
    observable = {effects.nodes[position] for position, it in effects.by_position.items() if it.observable}
    idle, left = True, False
    for node in reversed(effects.nodes):
        if node.target is not seed:
            idle = idle and node not in observable
        elif idle:
            gm.graph.erase_node(node)
        else:
            idle, left = True, True
    gm.recompile()
    return left
