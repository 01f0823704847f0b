"""A graph remembers the device that it was captured on wherever it makes a tensor; this makes it follow its
stage.

``torch.arange(4, device=x.device)`` is captured with the device written out, as a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["move_graph"]


def move_graph(gm: GraphModule, old: torch.device, new: torch.device) -> int:
    """Write ``new`` in place of ``old`` into the arguments of all nodes, in place. Returns how many nodes
    changed.

    Args:
        old: without an index it stands for every device of its type.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == old.type and old.index in (None, value.index):
            return new
        if isinstance(value, (list, tuple)):
            return type(value)([moved(item) for item in value])
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return value

    count = 0
    for node in gm.graph.nodes:
        args, kwargs = moved(tuple(node.args)), moved(dict(node.kwargs))
        if args != tuple(node.args) or kwargs != dict(node.kwargs):
            node.args, node.kwargs = args, kwargs
            count += 1
    if count:
        gm.recompile()
    return count
