"""Moves a captured graph to another device.

``torch.arange(4, device=x.device)`` is captured with the device as a constant, which moving tensors leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["move_graph", "named_devices"]


def move_graph(gm: GraphModule, old: torch.device, new: torch.device) -> int:
    """Replace a device by another in the arguments of all nodes, in place. Returns how many nodes changed.

    Args:
        old: without an index, every device of its type.
    """

    def moved(device: torch.device) -> torch.device:
        return new if device.type == old.type and old.index in (None, device.index) else device

    count = 0
    for node in gm.graph.nodes:
        args, kwargs = _mapped(tuple(node.args), moved), _mapped(dict(node.kwargs), moved)
        if args != tuple(node.args) or kwargs != dict(node.kwargs):
            node.args, node.kwargs = args, kwargs
            count += 1
    if count:
        gm.recompile()
    return count


def named_devices(gm: GraphModule) -> frozenset[torch.device]:
    """The devices that are written out in the graph's arguments."""
    devices: set[torch.device] = set()

    def noted(device: torch.device) -> torch.device:
        devices.add(device)
        return device

    for node in gm.graph.nodes:
        _mapped((node.args, node.kwargs), noted)
    return frozenset(devices)


def _mapped(value: Any, function: Callable[[torch.device], torch.device]) -> Any:
    if isinstance(value, torch.device):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(item, function) for item in value])
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    return value
