"""Effect rules for the Python functions and methods that traced graphs call."""

from __future__ import annotations

import inspect
import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from partita._torch.autograd.region_switches import is_barrier_function
from partita._torch.export.function_call import FunctionCall
from partita._torch.operators.schemas import aten_packet, is_operator, returns_one_tensor
from partita.graph.effect_rules.conditions import branch_effect, is_branch_function
from partita.graph.effect_rules.function_tables import (
    ALIASING_BUILTINS,
    ALIASING_METHODS,
    ALIASING_TORCH,
    CONTAINER_METHODS,
    CONTAINER_OPERATORS,
    DROPOUT_FUNCTIONALS,
    INPLACE_OPERATORS,
    OPERATORS,
    PURE_BUILTINS,
    PURE_METHODS,
    PURE_TORCH,
    RANDOM_FUNCTIONALS,
    RANDOM_STATE,
    WRITING_FUNCTIONALS,
)
from partita.graph.effect_rules.node_effect import PURE, NodeEffect, Rule, nodes_in, opaque
from partita.graph.effect_rules.operators import operator_rule

__all__ = ["function_rule", "is_tensor", "method_rule"]

_INPLACE_DUNDERS = frozenset(f"__{name.__name__}__" for name in INPLACE_OPERATORS)
_ITERATORS = (enumerate, filter, iter, map, reversed, zip)
_RETURN_SEVERAL = ("split", "chunk", "unbind", "tensor_split")
_MATH = frozenset(value for value in vars(math).values() if callable(value))
_TORCH_MODULES = (
    "torch",
    "torch.random",
    "torch.sym_node",
    "torch.nn.attention",
    "torch._functorch.predispatch",
)


def function_rule(target: Any) -> Rule | None:
    """Return the rule of a ``call_function`` target; None where every call is pure.

    Higher-order operators are not handled here: their effects are those of their bodies.
    """
    if is_operator(target):
        return operator_rule(target)
    if isinstance(target, FunctionCall):
        return _custom_function
    if is_branch_function(target):
        return branch_effect
    if inspect.ismethoddescriptor(target) and getattr(target, "__objclass__", None) is not None:
        return method_rule(target.__name__)
    if is_barrier_function(target):
        return lambda _node: NodeEffect(barrier=True, why=f"{target.__name__} changes global state")
    if target is torch.autograd.backward:
        return _runs_backward
    try:
        rule = _python_rule(target)
    except TypeError:  # an unhashable callable
        rule = NotImplemented
    return _torch_rule(target) if rule is NotImplemented else rule


def _custom_function(node: Node) -> NodeEffect:
    """A ``torch.autograd.Function``: what its ``forward`` was seen to do when it was captured."""
    call = node.target
    assert isinstance(call, FunctionCall)
    if not (call.writes or call.aliases or call.random):
        return PURE
    writes, aliases = (
        nodes_in([node.args[number] for number in numbers]) for numbers in (call.writes, call.aliases)
    )
    return NodeEffect(writes, aliases, random=call.random, why=f"{call.function.__name__}.apply")


def _python_rule(target: Any) -> Any:
    """The rule for the interpreter's own functions; NotImplemented where it is none of them."""
    if target in INPLACE_OPERATORS:
        return _writes_first
    if target in CONTAINER_OPERATORS:
        return _maybe_container
    if target in (operator.getitem, operator.pos) or target in ALIASING_BUILTINS:
        return (
            _aliases_operands if target in (operator.getitem, operator.pos, getattr) else _aliases_or_consumes
        )
    if target is print:
        return lambda _node: NodeEffect(host=True, why="print")
    if target in (all, any, operator.contains, operator.countOf, operator.indexOf):
        return _aliases_or_consumes
    if target in PURE_BUILTINS or target in OPERATORS or target in _MATH:
        return None
    return NotImplemented


def _torch_rule(target: Any) -> Rule | None:
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    unknown = f"unknown function {module}.{name}" if name else f"unknown callable {target!r}"
    if module == "torch.nn.functional":
        return _functional_rule(target, name)
    if module == "torch.functional":
        return _with_out(target, _aliases_operands)
    if module == "torch._tensor":
        return method_rule(name)
    if module == "torch.nn.init":
        return lambda node: NodeEffect(
            writes=nodes_in(node.args[:1]), aliases=nodes_in(node.args[:1]), random=True, why=name
        )
    if module in _TORCH_MODULES or module.startswith("torch._C"):
        rule = _torch_function_rule(name)
        if rule is not NotImplemented:
            return rule
    return lambda node: opaque(node, unknown)


def _torch_function_rule(name: str) -> Any:
    """The rule of ``torch.<name>``; NotImplemented where it is not known."""
    if name in RANDOM_STATE:
        return lambda _node: NodeEffect(random=True, host=True, why=f"torch.{name}")
    if name in PURE_TORCH or name.startswith("_sym_"):
        return None
    if name in ALIASING_TORCH:
        return _aliases_operands
    packet = aten_packet(name)
    if packet is not None:
        return operator_rule(packet)
    if name in ("_assert", "_check") or name.startswith("_check_"):
        return lambda _node: NodeEffect(host=True, why=f"torch.{name}")
    return NotImplemented


def _functional_rule(target: Any, name: str) -> Rule | None:
    signature = _signature(target)
    if signature is None:
        packet = aten_packet(name)
        if packet is not None:
            return operator_rule(packet)
        return lambda node: opaque(node, f"unknown function {name}")
    flag = DROPOUT_FUNCTIONALS.get(name)
    write_flag, written = WRITING_FUNCTIONALS.get(name, ("", ()))
    always_random = name in RANDOM_FUNCTIONALS
    inplace = "inplace" in signature
    if not (always_random or flag or written or inplace):
        return _with_out(target, None)
    first = next(iter(signature))

    def rule(node: Node) -> NodeEffect:
        writes: tuple[Node, ...] = ()
        if inplace and _argument(node, signature, "inplace"):
            writes = nodes_in(_argument(node, signature, first))
        if written and _argument(node, signature, write_flag) not in (None, False):
            writes += tuple(
                operand for key in written for operand in nodes_in(_argument(node, signature, key))
            )
        random = always_random or bool(flag and _argument(node, signature, flag))
        aliases = nodes_in(_argument(node, signature, first)) if writes or flag else ()
        if not (writes or aliases or random):
            return PURE
        return NodeEffect(writes=writes, aliases=aliases, random=random, why=f"torch.nn.functional.{name}")

    return rule


def _with_out(target: Any, rule: Rule | None) -> Rule | None:
    """Extend a rule by the ``out`` argument, a tensor that the function writes its result to."""
    signature = _signature(target)
    if signature is None or "out" not in signature:
        return rule

    def with_out(node: Node) -> NodeEffect:
        effect = PURE if rule is None else rule(node)
        out = nodes_in(_argument(node, signature, "out"))
        if not out:
            return effect
        why = f"{target.__name__}(out=)"
        return replace(effect, writes=effect.writes + out, aliases=effect.aliases + out, why=why)

    return with_out


def _signature(target: Any) -> dict[str, Any] | None:
    """The names of a Python function's parameters, in order, with their defaults; None for a built-in."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    return {name: parameter.default for name, parameter in parameters.items()}


def _argument(node: Node, signature: dict[str, Any], name: str) -> object:
    if name in node.kwargs:
        return node.kwargs[name]
    position = list(signature).index(name)
    return node.args[position] if position < len(node.args) else signature[name]


def method_rule(name: str) -> Rule | None:
    """Return the rule of a ``call_method`` target; None where every call is pure."""
    if name in _INPLACE_DUNDERS:
        return _writes_first
    if name == "backward":
        return _runs_backward
    if name in ("__enter__", "__exit__"):
        return lambda node: replace(opaque(node, f"{name} of a context manager"), barrier=True)
    if name in CONTAINER_METHODS:
        return _changes_container
    if name in ALIASING_METHODS:
        return _aliases_operands
    packet = aten_packet(name)
    if packet is not None:
        rule = operator_rule(packet)
        return _or_container_method(rule) if name in ("add", "sort") else rule
    if name in PURE_METHODS or (not hasattr(torch.Tensor, name) and name.startswith("is_")):
        return None
    return lambda node: opaque(node, f"unknown method {name}")


def _writes_first(node: Node) -> NodeEffect:
    """``x += y`` and ``x[i] = y``: the first operand changes; a container may contain the others then."""
    first = nodes_in(node.args[:1])
    why = str(getattr(node.target, "__name__", node.target))
    if first and (is_tensor(first[0]) or not _may_insert(node)):
        return NodeEffect(writes=first, aliases=first, why=why)
    return NodeEffect(writes=first, aliases=tuple(node.all_input_nodes), entangles=True, why=why)


def _may_insert(node: Node) -> bool:
    """Whether in ``x += y`` or ``x[i] = y`` the first operand may be a list or dict that takes ``y`` in."""
    if any(isinstance(value, (list, tuple)) and nodes_in(value) for value in node.args):
        return True
    if any(map(_is_container, nodes_in(node.args))):
        return True
    return (
        len(node.args) > 2 and isinstance(node.args[2], Node) and isinstance(node.args[1], (int, str, Node))
    )


def _changes_container(node: Node) -> NodeEffect:
    operands = tuple(node.all_input_nodes)
    return NodeEffect(writes=operands[:1], aliases=operands, entangles=True, why=str(node.target))


def _or_container_method(rule: Rule | None) -> Rule:
    """``add`` and ``sort`` return a tensor, or change a set or a list: then nobody uses the result."""

    def either(node: Node) -> NodeEffect:
        if node.users or is_tensor(nodes_in(node.args)[0]):
            return PURE if rule is None else rule(node)
        return _changes_container(node)

    return either


def _runs_backward(node: Node) -> NodeEffect:
    """A backward pass writes the ``grad`` of tensors that are not its operands, and runs their hooks."""
    return replace(opaque(node, "a backward pass"), barrier=True)


def _aliases_or_consumes(node: Node) -> NodeEffect:
    """Like `_aliases_operands`, for functions that iterate: an operand that is an iterator is used up."""
    operands = tuple(node.all_input_nodes)
    used_up = tuple(operand for operand in operands if operand.target in _ITERATORS)
    return NodeEffect(writes=used_up, aliases=operands, why="an iterator is used up" if used_up else "")


def _aliases_operands(node: Node) -> NodeEffect:
    return NodeEffect(aliases=tuple(node.all_input_nodes))


def _maybe_container(node: Node) -> NodeEffect:
    """``a + b`` of two lists contains their items; of two tensors it is a fresh tensor."""
    operands = nodes_in(node.args)
    containers = any(isinstance(value, (list, tuple)) for value in node.args)
    return NodeEffect(aliases=operands) if containers or any(map(_is_container, operands)) else PURE


def is_tensor(node: Node) -> bool:
    """Return whether a node's value is certainly a tensor."""
    if "val" in node.meta or "example_value" in node.meta:
        return isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor)
    if node.op == "call_function" and is_operator(node.target):
        return returns_one_tensor(node.target)
    if node.op == "call_method":
        packet = aten_packet(str(node.target))
        return packet is not None and returns_one_tensor(packet)
    if getattr(node.target, "__module__", None) == "torch" and node.op == "call_function":
        packet = aten_packet(getattr(node.target, "__name__", ""))
        return packet is not None and returns_one_tensor(packet)
    if node.op == "call_function" and node.target in OPERATORS and node.target is not operator.getitem:
        return not _is_container(node)  # a number shares no memory either
    return False


def _is_container(node: Node, depth: int = 4) -> bool:
    """Whether a node's value is, or may be, a list or tuple of tensors."""
    for key in ("val", "example_value"):
        if key in node.meta:
            return isinstance(node.meta[key], (list, tuple))
    if node.op == "placeholder":
        return any(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
    if node.op == "call_method":
        return node.target in (*_RETURN_SEVERAL, "values", "items", "size")
    if node.op == "call_function" and node.target in (operator.add, operator.mul) and depth:
        return any(_is_container(operand, depth - 1) for operand in nodes_in(node.args))
    name = getattr(node.target, "__name__", "")
    return name in (*_RETURN_SEVERAL, "list", "tuple", "meshgrid", "broadcast_tensors")
