"""Branches on data, in a graph: what a model does where ``if mask.all():`` holds, and what it does otherwise.

::

    if mask.all():                 condition = ReadCondition()(all)             True or False, in each run
        bias = None                mask      = OnlyIf(expand, False)(condition, ...)    None where it is True
    else:                          choose    = choose(condition, None, mask)
        bias = expand(mask)        sdpa      = sdpa(q, k, v, choose)
    sdpa(q, k, v, bias)

What one branch alone computes is not computed where the other is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node, has_side_effect

from partita._torch.tensors.storage import has_memory
from partita.errors import ExecutionError
from partita.graph.use import PLAIN, Use

__all__ = [
    "OnlyIf",
    "ReadCondition",
    "branch_use",
    "choose",
    "depends_on_branch",
    "is_branch_function",
    "require_condition",
]


@dataclass(frozen=True)
class _Target:
    """A target of a graph's nodes; fx names a function in its code after these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", type(self).__name__)
        object.__setattr__(self, "__module__", __name__)


@dataclass(frozen=True)
class ReadCondition(_Target):
    """Reads the truth of a tensor of one element.

    Attributes:
        assumed: what it is taken for where the tensor has no data.
        place: the line of the model that asks.
    """

    assumed: bool = field(default=False, compare=False)
    place: str = ""

    def __call__(self, condition: torch.Tensor) -> bool:
        """Its truth."""
        return bool(condition) if has_memory(condition) else self.assumed


@dataclass(frozen=True)
class OnlyIf(_Target):
    """Calls a function where a condition has this truth; None elsewhere.

    Attributes:
        target: the function; it changes nothing.
        truth: of the branch that it belongs to.
    """

    target: Callable[..., Any]
    truth: bool

    def __call__(self, condition: bool | None, *args: Any, **kwargs: Any) -> Any:
        """Its result, or None."""
        return self.target(*args, **kwargs) if condition is self.truth else None


def choose(condition: bool | None, if_true: Any, otherwise: Any) -> Any:
    """One of the two.

    >>> choose(True, "a", "b")
    'a'
    """
    return if_true if condition else otherwise


def require_condition(condition: bool | None, captured: bool, place: str, reason: str) -> None:
    """Refuse data for which the model takes another way than the one that was captured.

    Raises:
        ExecutionError: names the line that asks, and what to do.
    """
    if condition is not None and condition is not captured:
        raise ExecutionError(
            f"the model asks whether {place or 'a tensor is true'}, and takes another way now that it is "
            f"{condition}: the graph was captured where it is {captured}, and holds that way only, because "
            f"{reason}. Give such data to the model itself, or capture it with an example of this kind"
        )


has_side_effect(require_condition)


def depends_on_branch(node: Node) -> bool:
    """Whether the value of a node is a condition, or something else than a tensor where another branch is
    taken.
    """
    if node.target is choose:
        return not isinstance(node.meta.get("val"), torch.Tensor)
    return isinstance(node.target, (ReadCondition, OnlyIf))


def is_branch_function(target: object) -> bool:
    """Whether a node's target is one of these."""
    return isinstance(target, (ReadCondition, OnlyIf)) or target in (choose, require_condition)


def branch_use(node: Node) -> Use:
    """The effects of a node with such a target."""
    if node.target is require_condition:
        return Use(host=True, why="a check of the branch that was captured")
    if isinstance(node.target, ReadCondition):
        return PLAIN
    return Use(aliases=tuple(node.all_input_nodes), why="a branch on data")
