"""One graph for training and evaluation: what differs between the two becomes a look at the module's own flag.

Export freezes the flag: dropout captured in training mode stays on for ever. So the model is captured in both modes, the two
graphs are laid side by side, and where only constants differ they are chosen when the graph runs::

    train   dropout(x, 0.1, True)      sdpa(q, k, v, None, 0.1)
    eval    dropout(x, 0.1, False)     sdpa(q, k, v, None, 0.0)
    merged  dropout(x, 0.1, training)  sdpa(q, k, v, None, by_mode(training, 0.1, 0.0))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita.errors import CaptureError
from partita.graph.effects import metadata

__all__ = ["by_mode", "in_mode", "merge_modes", "require_mode"]


def by_mode(training: bool, train_value: Any, eval_value: Any) -> Any:
    """The constant for the mode that the module is in."""
    return train_value if training else eval_value


def require_mode(training: bool, captured: bool) -> None:
    """Refuse to run a graph in a mode that it was not captured in.

    Raises:
        CaptureError: always where the two differ.
    """
    if training != captured:
        wanted, has = ("train", "eval") if training else ("eval", "train")
        raise CaptureError(
            f"this graph was captured in {has} mode and can't run in {wanted} mode, because the model takes another path there: "
            f"call .{has}() on it, or capture the model again after model.{wanted}()"
        )


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch a model between training and evaluation; every module gets its own flag back."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def merge_modes(train: GraphModule, evaluation: GraphModule) -> bool:
    """Write the differences of ``evaluation`` into ``train``, in place.

    Returns:
        Whether that was possible: both graphs have the same nodes and differ in constants only.
    """
    pairs = list(zip(train.graph.nodes, evaluation.graph.nodes, strict=False))
    if len(train.graph.nodes) != len(evaluation.graph.nodes):
        return False
    twin = {other: node for node, other in pairs}
    if not all(_alike(node, other, twin) for node, other in pairs):
        return False
    for node, other in pairs:
        node.args = _merged(train.graph, node, node.args, other.args)
        node.kwargs = _merged(train.graph, node, node.kwargs, other.kwargs)
    train.graph.lint()
    train.recompile()
    return True


def mode_flag(graph: Graph, node: Node) -> Node:
    """The ``training`` flag of the module that owns the graph, as a node before ``node`` (one for the whole graph)."""
    for existing in graph.find_nodes(op="get_attr", target="training"):
        return existing
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        return graph.create_node("get_attr", "training")


def _alike(node: Node, other: Node, twin: dict[Node, Node]) -> bool:
    if node.op != other.op or (node.target != other.target and node.op != "get_attr"):
        return False
    if node.op == "get_attr" and node.target != other.target:
        return False
    value, other_value = metadata(node), metadata(other)
    if getattr(value, "shape", None) != getattr(other_value, "shape", None):
        return False
    return _same_shape(node.args, other.args, twin) and _same_shape(node.kwargs, other.kwargs, twin)


def _same_shape(left: Any, right: Any, twin: dict[Node, Node]) -> bool:
    """Whether two arguments are built alike and use the same values; constants may differ."""
    if isinstance(left, Node) or isinstance(right, Node):
        return isinstance(right, Node) and twin.get(right) is left
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same_shape(left[key], right[key], twin) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same_shape(a, b, twin) for a, b in zip(left, right, strict=True))
    return type(left) is type(right)


def _merged(graph: Graph, node: Node, left: Any, right: Any) -> Any:
    """``left``, with a choice by mode wherever ``right`` holds another constant."""
    if isinstance(left, Node):
        return left
    if isinstance(left, dict):
        return {key: _merged(graph, node, value, right[key]) for key, value in left.items()}
    if isinstance(left, (list, tuple)):
        return type(left)([_merged(graph, node, a, b) for a, b in zip(left, right, strict=True)])
    if left == right:
        return left
    flag = mode_flag(graph, node)
    if left is True and right is False:
        return flag
    with graph.inserting_before(node):
        return graph.call_function(by_mode, (flag, left, right))
