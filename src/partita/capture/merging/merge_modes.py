"""Merging the graphs of training and evaluation into one.

The nodes of the two are aligned. Where a constant differs, it is chosen when the graph runs::

    train   dropout(x, 0.1, True)       merged  dropout(x, 0.1, <flag>)
    eval    dropout(x, 0.1, False)

and a counter that only training increments (batch norm's) is incremented by 0 in evaluation::

    train   add_(num_batches, 1)        merged  add_(num_batches, {False: 0, True: 1}[<flag>])
    eval    (nothing)

Graphs that differ in any other way are not merged.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.containers.pytree import same_structure
from partita._torch.export.signature import all_arguments, signature_of
from partita.capture.merging.modes import mode_flag
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.tracing.module_paths import module_paths
from partita.graph.attributes import lookup
from partita.graph.effects import metadata

__all__ = ["merge_modes"]

_COUNT: Any = torch.ops.aten.add_.Tensor


def merge_modes(train: GraphModule, evaluation: GraphModule, model: nn.Module) -> bool:
    """Write the differences of ``evaluation`` into ``train``, in place.

    Args:
        model: what both were captured from.

    Returns:
        Whether that was possible. If not, ``train`` is unchanged.
    """
    # The two must have the same signature, nodes and structure of arguments.
    called, other_called = (signature_of(module, model.forward) for module in (train, evaluation))
    if not same_structure(called.in_spec, other_called.in_spec):
        return False
    if not same_structure(called.out_spec, other_called.out_spec):
        return False
    pairs = list(_aligned(train, evaluation))
    twin = {other: node for node, other in pairs if other is not None}
    if len(twin) != len(evaluation.graph.nodes):
        return False
    if not all(other is None or _alike(train, node, evaluation, other, twin) for node, other in pairs):
        return False
    # Choose by mode wherever constants differ.
    paths = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for node, other in pairs:
        path = _owner(node, paths)
        if other is None:
            node.args = (node.args[0], _choice(train, node, path, node.args[1], 0))
            continue
        left, right = _padded(node, other)
        node.args = _merged(train, node, path, left, right)
        node.kwargs = _merged(train, node, path, node.kwargs, other.kwargs)
    train.graph.lint()
    train.recompile()
    return True


def _aligned(train: GraphModule, evaluation: GraphModule) -> Iterator[tuple[Node, Node | None]]:
    """Each node of ``train`` with its counterpart in ``evaluation``; None for a counter that is not there."""
    others = iter(evaluation.graph.nodes)
    other = next(others, None)
    for node in train.graph.nodes:
        matches = other is not None and other.op == node.op and other.target == node.target
        if _counts(train, node) and not (matches and other is not None and other.args[1:] == node.args[1:]):
            yield node, None
        elif other is None:
            return
        else:
            yield node, other
            other = next(others, None)


def _counts(module: GraphModule, node: Node) -> bool:
    """Whether the node does nothing but add a constant to an integer tensor of the module."""
    if node.target is not _COUNT or node.users or node.kwargs or len(node.args) != 2:
        return False
    counter, step = node.args
    if not isinstance(counter, Node) or counter.op != "get_attr" or type(step) is not int:
        return False
    value = lookup(module, counter)
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


def _owner(node: Node, paths: set[str]) -> str:
    """The innermost module of the model that the node comes from."""
    return next((path for path in reversed(module_paths(node)) if path in paths), "")


def _alike(
    train: GraphModule, node: Node, evaluation: GraphModule, other: Node, twin: dict[Node, Node]
) -> bool:
    if node.op != other.op or node.target != other.target:
        return False
    if node.op == "get_attr" and not _same_value(lookup(train, node), lookup(evaluation, other)):
        return False
    value, other_value = metadata(node), metadata(other)
    for fact in ("shape", "dtype"):
        if getattr(value, fact, None) != getattr(other_value, fact, None):
            return False
    if _open(train, node) != _open(evaluation, other):
        return False
    left, right = _padded(node, other)
    return _same_structure(left, right, twin) and _same_structure(node.kwargs, other.kwargs, twin)


def _open(module: GraphModule, node: Node) -> tuple[Any, Any]:
    """The shape of a node's tensor, or its number, where they depend on open sizes."""
    sizes = Sizes.of(module)
    return sizes.shapes.get(node.name), sizes.numbers.get(node.name)


def _padded(node: Node, other: Node) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The positional arguments of both; defaults fill up where one has fewer (a dropout rate of 0.0)."""
    if len(node.args) == len(other.args):
        return node.args, other.args
    return all_arguments(node.target, node.args), all_arguments(other.target, other.args)


def _same_value(left: Any, right: Any) -> bool:
    """Whether an attribute is the same in both: a tensor of the model, or a constant with equal elements."""
    if left is right or not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return left.device.type != "meta" and torch.equal(left, right)


def _same_structure(left: Any, right: Any, twin: dict[Node, Node]) -> bool:
    """Whether two arguments have the same structure and nodes; constants may differ."""
    if isinstance(left, Node) or isinstance(right, Node):
        return isinstance(right, Node) and twin.get(right) is left
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same_structure(left[k], right[k], twin) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(
            _same_structure(a, b, twin) for a, b in zip(left, right, strict=True)
        )
    return type(left) is type(right)


def _merged(module: GraphModule, node: Node, path: str, left: Any, right: Any) -> Any:
    """``left``, with a choice by mode wherever ``right`` holds another constant."""
    if isinstance(left, Node):
        return left
    if isinstance(left, dict):
        return {key: _merged(module, node, path, value, right[key]) for key, value in left.items()}
    if isinstance(left, (list, tuple)):
        return type(left)([_merged(module, node, path, a, b) for a, b in zip(left, right, strict=True)])
    # 0.0 and -0.0 are equal
    return left if left == right and repr(left) == repr(right) else _choice(module, node, path, left, right)


def _choice(module: GraphModule, node: Node, path: str, in_train: Any, in_eval: Any) -> Node:
    flag = mode_flag(module, path)
    if in_train is True and in_eval is False:
        return flag
    with module.graph.inserting_before(node):
        # not a tuple: until torch 2.12 Dynamo does not index one with a bool
        by_mode: Any = {False: in_eval, True: in_train}
        choice = module.graph.call_function(operator.getitem, (by_mode, flag))
    choice.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    return choice
