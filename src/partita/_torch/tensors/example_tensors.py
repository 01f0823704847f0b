"""Example tensors whose sizes may be symbols: their bytes, and real tensors like them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

__all__ = ["example_bytes", "zeros_like_example"]


def example_bytes(value: torch.Tensor) -> int:
    """The bytes of a tensor's elements; a symbolic size counts as what it was in the example, or 1."""
    return math.prod(map(_hint, value.shape)) * value.element_size()


def _hint(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 1


def zeros_like_example(example: torch.Tensor, values: Sequence[Any], inputs: Sequence[Node]) -> torch.Tensor:
    """Zeros like an example tensor; symbols have the values that they have among a graph's inputs.

    Args:
        values: what the graph is called with.
        inputs: its placeholders, with example values.
    """
    sizes: dict[str, int] = {}
    if any(isinstance(size, torch.SymInt) for size in example.shape):
        for node, value in zip(inputs, values, strict=True):
            declared = node.meta["val"]
            if isinstance(declared, torch.SymInt):
                sizes[str(declared)] = int(value)
            elif isinstance(declared, torch.Tensor) and isinstance(value, torch.Tensor):
                sizes.update(
                    (str(size), actual) for size, actual in zip(declared.shape, value.shape, strict=True)
                )
    shape = [sizes[str(size)] if isinstance(size, torch.SymInt) else size for size in example.shape]
    return torch.zeros(shape, dtype=example.dtype, device=example.device)
