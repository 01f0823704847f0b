"""Shapes, dtypes and gradient flags, without computing anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita._torch.export.failure_logs import failure_logs_off
from partita._torch.export.open_sizes import only_checked
from partita._torch.export.users_code import is_users
from partita.errors import CaptureError

__all__ = ["UnknownNumber", "fake_values", "tracing_mode_of", "users_place"]

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s*(.+)')


class UnknownNumber:
    """Stands for a number that depends on data, and that the graph only checks:
    ``assert x.max().item() < 9``.
    """


def fake_values(
    gm: GraphModule,
    args: Sequence[Any],
    *,
    grad: bool = True,
    taken_after: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The value of every node of ``gm``, as fake tensors that know shape, dtype and ``requires_grad``, and
    have an autograd history.

    Nothing is computed, and no parameter or buffer of ``gm`` changes.

    Args:
        args: one value a placeholder; real tensors are read for their shapes only.
        grad: run with gradients on; otherwise values have no history.
        taken_after: names of values by the node after which they are taken as they are then. Others are as
            the last write leaves them, by which ``torch.zeros(4)`` may require a gradient.

    Returns:
        By the node's name. A number that depends on data, and that only assertions use, is an
        `UnknownNumber`.

    Raises:
        CaptureError: a shape or number depends on data; names the node and its line.
    """
    # torch's while_loop asks for a place for open sizes. All sizes are closed here: what depends on data is
    # refused as without one.
    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    tracing = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
    with failure_logs_off(), tracing as mode, torch.set_grad_enabled(grad):
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
        run = _Recorder(gm, mode, taken_after)
        run.run(*fakes, enable_io_processing=False)
    return run.values


def tracing_mode_of(value: torch.Tensor) -> FakeTensorMode | None:
    """The mode that a plain fake tensor was made in; None for other tensors (subclasses around fake tensors
    too, which have no storage of their own).
    """
    return value.fake_mode if isinstance(value, FakeTensor) else None


class _Recorder(Interpreter):
    def __init__(
        self, gm: GraphModule, mode: FakeTensorMode, taken_after: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self._taken_after = taken_after
        self._mode = mode
        self._checked = only_checked(gm)

    def run_node(self, n: Node) -> Any:
        result = self._result(n)
        for name in self._taken_after.get(n.name, ()):
            value = self.values[name]
            if isinstance(value, torch.Tensor):
                self.values[name] = value.detach().requires_grad_(value.requires_grad)
        return result

    def _result(self, n: Node) -> Any:
        if any(isinstance(self.env[operand], UnknownNumber) for operand in n.all_input_nodes):
            self.values[n.name] = UnknownNumber()
            return self.values[n.name]
        try:
            result = super().run_node(n)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if n not in self._checked or isinstance(error, DynamicOutputShapeException):
                self.extra_traceback = False  # the interpreter's own, which it would put into the message
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
    users = [frame for frame in frames if is_users(frame[0])]
    return "{3}  # {0}:{1} in {2}".format(*users[-1]) if users else ""


def _unknown(node: Node) -> str:
    line = users_place(node)
    place = f" (at {line})" if line else ""
    return (
        f"what {node.name!r} returns depends on the values of tensors{place}, and not on shapes alone: take "
        "it out of forward (.item(), nonzero(), a mask as an index), for example with torch.where, or "
        'compute it before and pass it in. Or cut the model at its blocks: frontend="modules"'
    )
