"""Values in a graph that is being traced which follow from constants and sizes: computed at once. A tensor
without elements is a constant, whatever it is computed from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from partita._torch.containers.pytree import tree_map
from partita._torch.export.open_sizes import SIZE_OF, is_symbolic, size_at
from partita._torch.operators.schemas import operator_facts

__all__ = ["draws_random_numbers", "from_constants", "is_whole_slice", "is_written"]

_MOST_NODES = 100
"""A value that takes more nodes to compute is not looked at."""
_OTHER_SIZES: tuple[Callable[[int], int], ...] = (
    lambda size: size + 1,
    lambda size: 16 * size,
    lambda _size: 1,
)
_ARITHMETIC = frozenset(getattr(operator, name) for name in operator.__all__)


def from_constants(node: Node) -> bool | None:
    """Return the truth of a node's value where it is computed from constants and sizes of the graph's inputs
    alone, and stays the same for other open sizes; else None.

    Args:
        node: of a graph that is being traced: open sizes in its metadata know their example.
    """
    order: dict[Node, None] = {}
    if not _is_made_of_constants(node, order) or is_written(order):
        return None
    example = _truth(order, lambda size: size)
    try:
        same = all(_truth(order, change) == example for change in _OTHER_SIZES)
    except RuntimeError:  # the model has no such size
        return None
    return example if same else None


def _truth(order: Iterable[Node], change: Callable[[int], int]) -> bool:
    """Compute these nodes, in order, and return the truth of the last."""
    values: dict[Node, Any] = {}
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for node in order:
            if node.target is SIZE_OF:
                values[node] = size_at(node.meta["val"], change)
                continue
            if _is_empty(node):
                values[node] = _empty_like(node.meta["val"], change)
                continue
            args, kwargs = tree_map(_off_meta, map_arg((node.args, node.kwargs), values.__getitem__))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return bool(values[node])


def _is_made_of_constants(node: Node, order: dict[Node, None]) -> bool:
    """Whether a node is computed from constants and sizes alone. The nodes that it takes are added to
    ``order``, each after its operands.
    """
    if node in order:
        return True
    if node.op != "call_function" or len(order) > _MOST_NODES:
        return False
    if node.target is not SIZE_OF and not _is_empty(node):
        operands = node.all_input_nodes
        if not _is_pure(node) or not all(_is_made_of_constants(operand, order) for operand in operands):
            return False
    order[node] = None
    return True


def _is_pure(node: Node) -> bool:
    """Whether a node writes to nothing and draws no random numbers."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload):
        return target in _ARITHMETIC and is_symbolic(value)
    return not (target._schema.is_mutable or draws_random_numbers(node))


def draws_random_numbers(node: Node) -> bool:
    """Whether a node's operator draws random numbers, so that it has another value each time."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_empty(node: Node) -> bool:
    """Whether a node's value is a tensor without elements, whichever size open sizes have."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(type(size) is int and size == 0 for size in value.shape)


def _empty_like(value: torch.Tensor, change: Callable[[int], int]) -> torch.Tensor:
    shape = [size_at(size, change) for size in value.shape]
    return torch.empty(shape, dtype=value.dtype, device=_off_meta(value.device))


def _off_meta(value: Any) -> Any:
    """What is on the meta device is worked out on the CPU, where it has values."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def is_whole_slice(node: Node) -> bool:
    """Whether a node takes all of its operand, as ``x[:, :length]`` does where ``x`` has that length, or is
    another name for it.
    """
    if node.target not in (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default):
        return False
    value, whole = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    # as expressions: to compare open sizes would fix them
    left, right = ([*map(str, (*tensor.shape, *tensor.stride()))] for tensor in (value, whole))
    return left == right


def is_written(nodes: Iterable[Node]) -> bool:
    """Whether something writes to the values of these nodes, or to a view of them."""
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for user in node.users:
            written, viewed = _does_to(user, node)
            if written:
                return True
            if viewed and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _does_to(user: Node, node: Node) -> tuple[bool, bool]:
    """Whether ``user`` writes to ``node``, and whether its value may share memory with it."""
    if not isinstance(user.target, OpOverload):
        return False, user.target not in _ARITHMETIC or user.target is operator.getitem
    (facts,) = operator_facts(user.target)
    values = [(argument, argument.value_in(user.args, user.kwargs)) for argument in facts.arguments]
    touching = [argument for argument, value in values if node in _nodes_in(value)]
    viewed = facts.may_alias_all or any(argument.aliased for argument in touching)
    return any(argument.written for argument in touching), viewed


def _nodes_in(value: Any) -> list[Node]:
    nodes: list[Node] = []
    map_arg(value, nodes.append)
    return nodes
