"""A copy of a graph that shares nothing that changes."""

from __future__ import annotations

import copy
from typing import Any

from torch.fx import Graph

__all__ = ["copy_graph"]


def copy_graph(graph: Graph) -> Graph:
    """Copy all nodes with their names, their metadata (shallow), and the way in which inputs are flattened.

    ``copy.deepcopy`` of a graph also copies the structure of its inputs, which never changes.
    """
    result = Graph(tracer_cls=graph._tracer_cls, tracer_extras=graph._tracer_extras)
    result._codegen = copy.copy(graph._codegen)
    copied: Any = result.graph_copy(graph, {}, return_output_node=True)
    if copied is not None:
        returned, output = copied
        result.output(returned, output.type).meta = copy.copy(output.meta)
    return result
