"""Making the grad and autocast regions of a trace independent of the modes in which the graph is called.

At the end of a region a trace sets grad mode to the value that it had before *while tracing*. Called under
``no_grad``, the graph would switch gradients on. So the end of a region restores the value that its start has
read::

    traced  _set_grad_enabled(False) ... _set_grad_enabled(True)

    here    previous = is_grad_enabled()
            _set_grad_enabled(False) ... _set_grad_enabled(previous)

Autocast's cache of converted weights is off in every region (it is while tracing, too): a weight that is
used twice is converted twice, so that results do not depend on where the graph is cut. The gradient of a
weight that is used twice in one autocast region is thereby summed in the weight's own precision, where the
model sums it in the lower one.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import ENTER_AUTOCAST, SET_GRAD
from partita._torch.export.export import METADATA_CHECK

__all__ = ["make_regions_relative"]

_CACHE = 3
"""Which argument of entering autocast says whether weights are cached."""


def make_regions_relative(gm: GraphModule) -> None:
    """Rewrite the regions of ``gm`` in place, and remove the tracer's checks of devices and dtypes."""
    open_regions: list[tuple[bool, Node]] = []
    mode = True  # while tracing
    for node in list(gm.graph.nodes):
        if node.target is METADATA_CHECK:
            gm.graph.erase_node(node)
        elif node.target is ENTER_AUTOCAST:
            node.args = (*node.args[:_CACHE], False)
        elif node.target is SET_GRAD:
            value = bool(node.args[0])
            if open_regions and open_regions[-1][0] == value:
                node.args = (open_regions.pop()[1],)
            else:
                with gm.graph.inserting_before(node):
                    open_regions.append((mode, gm.graph.call_function(torch.is_grad_enabled)))
            mode = value
    gm.graph.lint()
    gm.recompile()
