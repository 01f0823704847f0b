"""Shapes, dtypes, gradient flags and the flow of gradients, without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

__all__ = ["fake_values", "reaches_all"]


def fake_values(gm: GraphModule, args: Sequence[Any]) -> dict[str, Any]:
    """The value of every node of ``gm``, as fake tensors that know shape, dtype and ``requires_grad``, and
    have an autograd history.

    Runs with gradients on. Nothing is computed, and no parameter or buffer of ``gm`` changes.

    Args:
        args: one value a placeholder; real tensors are read for their shapes only.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
        run = _Recorder(gm, mode)
        run.run(*fakes, enable_io_processing=False)
    return run.values


def reaches_all(result: torch.Tensor, values: Iterable[torch.Tensor]) -> bool:
    """Whether the backward pass of ``result`` gives each of ``values`` a gradient.

    Args:
        result: from `fake_values`, as are ``values``. Its history is used up.
    """
    wanted = list({id(value): value for value in values}.values())
    if not wanted:
        return True
    if not isinstance(result, FakeTensor):
        return False
    with result.fake_mode:
        found = torch.autograd.grad([result], wanted, [torch.ones_like(result)], allow_unused=True)
    return all(gradient is not None for gradient in found)


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self._mode = mode

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, torch.Tensor):
            # left to itself the mode runs what it holds for constants, such as a counter's add_, for real
            result = self._mode.from_tensor(result)
        self.values[n.name] = result
        return result
