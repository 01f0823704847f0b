"""What is known of a node's value: on which devices its tensors lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.operators.capturable import has_data_dependent_size
from partita._torch.tensors.subclasses import is_plain_tensor
from partita.graph.effects import metadata
from partita.graph.state import lookup

__all__ = ["DATA_DEPENDENT", "NOTHING", "UNKNOWN", "Holding", "holding_of", "tensors_in"]


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors in one value.

    Attributes:
        known: whether there is an example value at all.
        devices: of all tensors that are more than a 0-d one on the CPU.
        host_scalar: whether there are 0-d tensors on the CPU.
        empty: whether there are no tensors.
        nothing: whether the value is None.
        mask: whether it is a tensor of booleans or bytes, which as an index stands for the places that are
            set.
        problem: why tensors of this kind can't be captured, or an empty string.
    """

    known: bool = True
    devices: frozenset[torch.device] = frozenset()
    host_scalar: bool = False
    empty: bool = False
    nothing: bool = False
    mask: bool = False
    problem: str = ""


DATA_DEPENDENT = "a tensor whose shape depends on the data"
UNKNOWN = Holding(known=False)
NOTHING = Holding(empty=True)
_NONE = Holding(empty=True, nothing=True)


def holding_of(gm: GraphModule, node: Node) -> Holding:
    """What the value of ``node`` holds, from its example value; attributes are looked up."""
    if "val" in node.meta or "example_value" in node.meta:
        return _holding(metadata(node))
    if node.op != "get_attr":
        return UNKNOWN
    value = lookup(gm, node)
    return NOTHING if isinstance(value, nn.Module) else _holding(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _holding(value: Any) -> Holding:
    if value is None:
        return _NONE
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    tensors = list(tensors_in(value))
    if not tensors:
        return NOTHING
    parts = [_of_tensor(tensor) for tensor in tensors]
    return Holding(
        devices=frozenset().union(*(part.devices for part in parts)),
        host_scalar=any(part.host_scalar for part in parts),
        problem=next((part.problem for part in parts if part.problem), ""),
    )


def _of_tensor(tensor: torch.Tensor) -> Holding:
    problem = ""
    if not is_plain_tensor(tensor):
        problem = f"a tensor of type {type(tensor).__name__}, whose parts are not known"
    elif tensor.layout is not torch.strided:
        problem = f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    elif has_data_dependent_size(tensor):
        problem = DATA_DEPENDENT
    mask = tensor.dtype in (torch.bool, torch.uint8)
    return _shared(tensor.device, tensor.device.type == "cpu" and tensor.dim() == 0, mask, problem)


@lru_cache(maxsize=256)
def _shared(device: torch.device, scalar: bool, mask: bool, problem: str) -> Holding:
    """Most values are of a few kinds."""
    devices = frozenset() if scalar else frozenset({device})
    return Holding(devices=devices, host_scalar=scalar, mask=mask, problem=problem)
