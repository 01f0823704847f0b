"""Targets of the nodes that express a branch on data in a graph, such as ``if mask.all():``.

::

    if mask.all():                 condition = ReadCondition()(all)             True or False, in each run
        bias = None                mask      = OnlyIf(expand, False)(condition, ...)    None where it is True
    else:                          choose    = choose(condition, None, mask)
        bias = expand(mask)        sdpa      = sdpa(q, k, v, choose)
    sdpa(q, k, v, bias)

What only one branch computes is not computed where the other one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node, has_side_effect

from partita._torch.operators.schemas import is_operator
from partita._torch.tensors.storage import has_memory
from partita.errors import ExecutionError
from partita.graph.effect_rules.node_effect import PURE, NodeEffect, nodes_in
from partita.graph.effect_rules.operators import operator_call_rule

__all__ = [
    "OnlyIf",
    "ReadCondition",
    "branch_effect",
    "choose",
    "depends_on_branch",
    "is_branch_function",
    "reads_condition",
    "require_condition",
]


@dataclass(frozen=True)
class _Target:
    """A callable target of nodes; the code that fx generates calls it by the name of its class."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", type(self).__name__)
        object.__setattr__(self, "__module__", __name__)


@dataclass(frozen=True)
class ReadCondition(_Target):
    """Reads the truth of a tensor of one element.

    Attributes:
        assumed: the answer where the tensor has no data.
        place: the line of the model that asks.
    """

    assumed: bool = field(default=False, compare=False)
    place: str = ""

    def __call__(self, condition: torch.Tensor) -> bool:
        """Return the truth of ``condition``."""
        return bool(condition) if has_memory(condition) else self.assumed


@dataclass(frozen=True)
class OnlyIf(_Target):
    """Calls a function where a condition has this truth; None elsewhere.

    Attributes:
        target: the function; it has no side effect, but may write to memory.
        truth: the answer on which the branch of this node is taken.
    """

    target: Callable[..., Any]
    truth: bool

    def __call__(self, condition: bool | None, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result where ``condition`` has this truth, else None."""
        if condition is None or _is_other(condition, self.truth):
            return None
        return self.target(*args, **kwargs)


def _is_other(condition: bool, truth: bool) -> bool:
    """Whether a condition has another truth. It is asked for it: to a compiler it may be a symbol, which *is*
    neither True nor False.
    """
    return not condition if truth else condition


def choose(condition: bool | None, if_true: Any, otherwise: Any) -> Any:
    """Return ``if_true`` where the condition holds, else ``otherwise``; a condition that was not read (None)
    counts as false.

    >>> choose(True, "a", "b")
    'a'
    """
    return if_true if condition else otherwise


def require_condition(condition: bool | None, captured: bool, place: str, reason: str) -> None:
    """Refuse data for which the model takes another branch than the one that was captured.

    Raises:
        ExecutionError: names the line that asks, and what to do.
    """
    if condition is not None and _is_other(condition, captured):
        raise ExecutionError(
            f"the model asks whether {place or 'a tensor is true'}, and takes another way now that it is "
            f"{condition}: the graph was captured where it is {captured}, and holds that way only, because "
            f"{reason}. Give such data to the model itself, capture it with an example of this kind, or cut "
            'it at its blocks, where its own code decides in each run: pipeline(..., frontend="modules")'
        )


has_side_effect(require_condition)


def depends_on_branch(node: Node) -> bool:
    """Return whether a node's value is a condition, or is no tensor where the other branch is taken."""
    if node.target is choose:
        return not isinstance(node.meta.get("val"), torch.Tensor)
    return isinstance(node.target, (ReadCondition, OnlyIf))


def reads_condition(node: Node) -> bool:
    """Return whether a node's value is a condition: None where it is asked in a branch that is not taken."""
    target = node.target
    while isinstance(target, OnlyIf):
        target = target.target
    return isinstance(target, ReadCondition)


def is_branch_function(target: object) -> bool:
    """Return whether a node's target is one of this module."""
    return isinstance(target, (ReadCondition, OnlyIf)) or target in (choose, require_condition)


def branch_effect(node: Node) -> NodeEffect:
    """Return the effect of a node with such a target."""
    return _effect_of_call(node.target, node.args, node.kwargs)


def _effect_of_call(target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NodeEffect:
    if target is require_condition:
        return NodeEffect(host=True, why="a check of the branch that was captured")
    if isinstance(target, ReadCondition):
        return PURE
    if isinstance(target, OnlyIf) and is_branch_function(target.target):
        return _effect_of_call(target.target, args[1:], kwargs)  # a branch within a branch
    if isinstance(target, OnlyIf) and is_operator(target.target):
        rule = operator_call_rule(target.target)
        return PURE if rule is None else rule(args[1:], kwargs)
    values = nodes_in((args[1:], kwargs))  # the condition is no memory
    return NodeEffect(aliases=tuple(dict.fromkeys(values)), why="a branch on data")
