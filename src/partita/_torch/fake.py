"""Shapes, dtypes, gradient flags and the flow of gradients, without computing anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule, Interpreter, Node

from partita._torch.symbolic import only_checked
from partita.errors import CaptureError

__all__ = ["UnknownNumber", "fake_gradients", "fake_values", "tracing_mode_of", "users_place"]

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s*(.+)')
_TORCH = str(Path(torch.__file__).parent)

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, NotImplementedError)
"""What an operator raises that can't be run without computing."""


class UnknownNumber:
    """Stands for a number that depends on data, and that the graph only checks:
    ``assert x.max().item() < 9``.
    """


def fake_values(gm: GraphModule, args: Sequence[Any], *, grad: bool = True) -> dict[str, Any]:
    """The value of every node of ``gm``, as fake tensors that know shape, dtype and ``requires_grad``, and
    have an autograd history.

    Nothing is computed, and no parameter or buffer of ``gm`` changes.

    Args:
        args: one value a placeholder; real tensors are read for their shapes only.
        grad: run with gradients on; otherwise values have no history.

    Returns:
        By the node's name. A number that depends on data, and that only assertions use, is an
        `UnknownNumber`.

    Raises:
        CaptureError: a shape or number depends on data; names the node and its line.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(grad):
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
        run = _Recorder(gm, mode)
        run.run(*fakes, enable_io_processing=False)
    return run.values


def tracing_mode_of(value: torch.Tensor) -> FakeTensorMode | None:
    """The mode that a plain fake tensor was made in; None for other tensors (subclasses around fake tensors
    too, which have no storage of their own).
    """
    return value.fake_mode if isinstance(value, FakeTensor) else None


def fake_gradients(
    results: Sequence[torch.Tensor], values: Iterable[torch.Tensor]
) -> dict[int, torch.Tensor | None]:
    """The gradients of ``values``, as fake tensors that know shape and strides; by the id of the value.

    Results that autograd can't start from (it needs a value that the model writes to later, or an operator
    without a backward) are left out: a model may have such, and train on its others.

    None for one that the results do not depend on, and for all where an operator of the backward pass can't
    be run without computing.

    Args:
        results: from `fake_values`, as are ``values``; they require grad.
    """
    wanted = {id(value): value for value in values}
    modes = [result.fake_mode for result in results if isinstance(result, FakeTensor)]
    if not wanted or not modes:
        return dict.fromkeys(wanted)
    with modes[0]:
        leaves = list(wanted.values())
        try:
            found = _backward(results, leaves)
            if found is None:
                found = _backward([result for result in results if _backward([result], leaves)], leaves)
        except _NEEDS_VALUES:
            found = None
    return dict.fromkeys(wanted) if found is None else dict(zip(wanted, found, strict=True))


def _backward(
    results: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...] | None:
    """None where autograd refuses, or there is nothing to start from."""
    if not results:
        return None
    seeds = [torch.ones_like(result) for result in results]
    try:
        return torch.autograd.grad(results, values, seeds, allow_unused=True, retain_graph=True)
    except _NEEDS_VALUES:
        raise
    except RuntimeError:  # the user gets it from the step that asks for this gradient, if any does
        return None


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self._mode = mode
        self._checked = only_checked(gm)

    def run_node(self, n: Node) -> Any:
        if any(isinstance(self.env[given], UnknownNumber) for given in n.all_input_nodes):
            self.values[n.name] = UnknownNumber()
            return self.values[n.name]
        try:
            result = super().run_node(n)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if n not in self._checked or isinstance(error, DynamicOutputShapeException):
                raise CaptureError(_unknown(n)) from error
            result = UnknownNumber()
        if n.op == "get_attr" and isinstance(result, torch.Tensor):
            # left to itself the mode runs what it holds for constants, such as a counter's add_, for real
            result = self._mode.from_tensor(result)
        self.values[n.name] = result
        return result


def users_place(node: Node) -> str:
    """The user's line that a node was traced from; empty where none is known."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace", "")))
    users = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return "{3}  # {0}:{1} in {2}".format(*users[-1]) if users else ""


def _unknown(node: Node) -> str:
    line = users_place(node)
    place = f" (at {line})" if line else ""
    return (
        f"what {node.name!r} returns depends on the values of tensors{place}, and not on shapes alone: take "
        f"it out of "
        "forward (.item(), nonzero(), a mask as an index), for example with torch.where, or compute it "
        "before and pass "
        "it in"
    )
