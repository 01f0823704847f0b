"""Shapes, dtypes and gradient flags without computing anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

__all__ = ["fake_values"]


def fake_values(gm: GraphModule, args: Sequence[Any]) -> dict[str, Any]:
    """The value of every node of ``gm``, as fake tensors that know shape, dtype and ``requires_grad``.

    Runs with gradients on. Nothing is computed, and no parameter or buffer of ``gm`` changes.

    Args:
        args: one value a placeholder; real tensors are read for their shapes only.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
        run = _Recorder(gm)
        run.run(*fakes, enable_io_processing=False)
    return run.values


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.values[n.name] = result
        return result
