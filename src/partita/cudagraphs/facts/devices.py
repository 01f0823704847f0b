"""Example values of nodes: on which devices their tensors lie, and of what kind they are."""

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
from partita._torch.tensors.tensor_text import short_name
from partita.graph.attributes import lookup
from partita.graph.effects import metadata

__all__ = ["DATA_DEPENDENT", "NOTHING", "UNKNOWN", "ValueFacts", "tensors_in", "value_facts"]


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """The tensors in one example value.

    Attributes:
        has_example: whether there is an example value at all.
        devices: of all tensors that are more than a 0-d one on the CPU.
        host_scalar: whether there are 0-d tensors on the CPU.
        empty: whether there are no tensors.
        is_none: whether the value is None.
        mask: whether it is a tensor of booleans or bytes, which as an index stands for the places that are
            set.
        problem: why tensors of this kind can't be captured, or an empty string.
    """

    has_example: bool = True
    devices: frozenset[torch.device] = frozenset()
    host_scalar: bool = False
    empty: bool = False
    is_none: bool = False
    mask: bool = False
    problem: str = ""

    @property
    def is_number(self) -> bool:
        """Whether it is something without tensors, such as a number, a size or a list of them."""
        return self.empty and not self.is_none


DATA_DEPENDENT = "a tensor whose shape depends on the data"
UNKNOWN = ValueFacts(has_example=False)
NOTHING = ValueFacts(empty=True)
_NONE = ValueFacts(empty=True, is_none=True)


def value_facts(gm: GraphModule, node: Node) -> ValueFacts:
    """Return what is known of the value of ``node``, from its example value; attributes are looked up."""
    if "val" in node.meta or "example_value" in node.meta:
        return _facts_of(metadata(node))
    if node.op != "get_attr":
        return UNKNOWN
    value = lookup(gm, node)
    return NOTHING if isinstance(value, nn.Module) else _facts_of(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _facts_of(value: Any) -> ValueFacts:
    if value is None:
        return _NONE
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    tensors = list(tensors_in(value))
    if not tensors:
        return NOTHING
    parts = [_of_tensor(tensor) for tensor in tensors]
    return ValueFacts(
        devices=frozenset().union(*(part.devices for part in parts)),
        host_scalar=any(part.host_scalar for part in parts),
        problem=next((part.problem for part in parts if part.problem), ""),
    )


def _of_tensor(tensor: torch.Tensor) -> ValueFacts:
    problem = ""
    if not is_plain_tensor(tensor):
        problem = f"a tensor of type {type(tensor).__name__}, whose parts are not known"
    elif tensor.layout is not torch.strided:
        problem = f"a tensor of layout {short_name(tensor.layout)}"
    elif has_data_dependent_size(tensor):
        problem = DATA_DEPENDENT
    mask = tensor.dtype in (torch.bool, torch.uint8)
    return _shared(tensor.device, tensor.device.type == "cpu" and tensor.dim() == 0, mask, problem)


@lru_cache(maxsize=256)
def _shared(device: torch.device, scalar: bool, mask: bool, problem: str) -> ValueFacts:
    # most values are of a few kinds, which share one object
    devices = frozenset() if scalar else frozenset({device})
    return ValueFacts(devices=devices, host_scalar=scalar, mask=mask, problem=problem)
