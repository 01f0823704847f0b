"""What autograd knows of the backward pass that is running: which one, which node, and what it will reach.

Autograd runs a backward pass as a task with a number; a backward pass inside a node of another (a reentrant
checkpoint) is a task of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge

__all__ = [
    "accumulator",
    "at_end_of_pass",
    "compiled_nodes",
    "current_node",
    "current_pass",
    "grad_version",
    "inside_another_pass",
    "leaves_after",
    "leaves_behind",
    "storage_users",
    "takes_gradient",
    "will_reach",
]

_COMPILED = "CompiledFunctionBackward"
_SEARCH_LIMIT = 64


def current_pass() -> int:
    """The number of the backward pass that this thread runs, or -1."""
    return torch._C._current_graph_task_id()


def current_node() -> Any:
    """The node of the autograd graph that this thread runs, or None."""
    return torch._C._current_autograd_node()


def accumulator(parameter: torch.Tensor) -> Node:
    """The node that adds gradients to ``parameter.grad``. It lives on as long as somebody holds it."""
    return get_gradient_edge(parameter).node


def takes_gradient(tensor: torch.Tensor) -> bool:
    """Whether a backward pass can start from ``tensor``.

    A view that was taken under ``no_grad`` requires a gradient, as what it is of does, and nothing gets it.
    """
    if not tensor.requires_grad or tensor.grad_fn is not None or not tensor._is_view():
        return tensor.requires_grad
    with torch.enable_grad():
        view: Any = tensor.view_as(tensor).grad_fn
    return view.next_functions[0][0] is not None


def will_reach(node: Node) -> bool:
    """Whether the backward pass that this thread runs will run ``node`` (or has run it already).

    False in a pass of ``torch.autograd.grad`` for a node of `accumulator`: it fills no ``grad``.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def at_end_of_pass(function: Callable[[], None]) -> None:
    """Call ``function`` in the thread of the backward pass, when all of its nodes have run.

    What it raises comes out of ``backward()``.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def inside_another_pass() -> bool:
    """Whether the backward pass of this thread was started by a node of another one."""
    frame = sys._getframe()
    started_here = False
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            started_here = True
        elif started_here and frame.f_code in _PYTHON_NODES:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_PYTHON_NODES = frozenset(
    function.__code__
    for name in ("apply", "apply_boxed")
    if (function := vars(BackwardCFunction).get(name)) is not None
)


def compiled_nodes(outputs: Any) -> list[Any]:
    """The autograd nodes of compiled graphs that ``outputs``, a flat sequence, directly come from.

    An output that is a view of another has a few nodes in between; they are looked through.
    """
    compiled: dict[int, Any] = {}
    seen: set[int] = set()
    queue = [
        value.grad_fn for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    while queue and len(seen) < _SEARCH_LIMIT + len(outputs):
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.name() == _COMPILED:
            compiled[id(node)] = node
            continue
        queue += [following for following, _ in node.next_functions if following is not None]
    return list(compiled.values())


def leaves_after(node: Any) -> Iterator[torch.Tensor | None]:
    """Yield, for each gradient that ``node`` computes, the leaf that it is for, or None."""
    for following, _ in node.next_functions:
        yield getattr(following, "variable", None)


def leaves_behind(values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that gradients of ``values`` would be added up in."""
    waiting = [value.grad_fn for value in values]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        fresh = dict.fromkeys(following for following, _ in node.next_functions if following not in seen)
        seen.update(fresh)
        waiting += fresh


def grad_version(parameter: torch.Tensor) -> tuple[int, int]:
    """Return a value that stays equal, in one backward pass, as long as nobody writes ``parameter.grad``."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of ``tensor``, itself among them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1
