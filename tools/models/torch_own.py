"""What ``torch.distributed.pipelining.pipeline`` makes of the same models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from partita.verification.tree import tensors

__all__ = ["cut_by_torch", "middle_block"]


def cut_by_torch(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Cut in two before the middle block, run in evaluation mode, and compare the outputs.

    Raises:
        Exception: whatever torch raises; AssertionError where outputs differ.
    """
    model = model.eval()
    with torch.no_grad():
        expected = _tensors(model(**inputs))
    pipe = pipeline(model, (), inputs, split_spec={middle_block(model): SplitPoint.BEGINNING})
    if pipe.num_stages != 2:
        raise AssertionError(f"cut in {pipe.num_stages}, not 2")
    with torch.no_grad():
        actual = _tensors(pipe(**inputs))
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} tensors come out, not {len(expected)}")
    if not all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True)):
        raise AssertionError("outputs differ")


def middle_block(model: nn.Module) -> str:
    """Return the name of the middle one in the model's longest list of modules (the last such list)."""
    lists = [(name, child) for name, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    name, blocks = max(lists, key=lambda item: len(item[1]))
    return f"{name}.{len(blocks) // 2}"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in tensors(value, "")]
