"""Effect rules for Python functions and methods that stand in traced graphs."""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from partita._torch.ops import aten_packet, is_operator
from partita._torch.regions import is_barrier_function
from partita.graph.operators import operator_rule
from partita.graph.use import PLAIN, Rule, Use, nodes_in, opaque

__all__ = ["function_rule", "method_rule"]

_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem delitem".split()
    )
)
_CONTAINER_OPERATORS = frozenset({operator.add, operator.mul, operator.concat})
_PLAIN_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        "abs all any bool callable complex divmod float format hasattr hash id int isinstance issubclass len "
        "ord pow range repr round str type".split()
    )
)
# These hand on what they were given.
_PASSING_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in "dict enumerate frozenset getattr list max min reversed set slice sorted sum tuple zip".split()
)
_PLAIN_TORCH = frozenset(
    "tensor is_tensor numel is_floating_point is_complex is_nonzero get_default_dtype get_default_device is_grad_enabled "
    "is_autocast_enabled is_inference_mode_enabled get_autocast_dtype promote_types result_type finfo iinfo typename "
    "broadcast_shapes sym_int sym_float sym_max sym_min sym_not sym_sum sym_ite sym_sqrt can_cast".split()
)
_RANDOM_STATE = frozenset("manual_seed seed initial_seed get_rng_state set_rng_state fork_rng".split())
_RANDOM_FUNCTIONALS = frozenset(
    "gumbel_softmax fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices".split()
)
# name -> the flag that switches it on; the random ones, then those that write their operands.
_DROPOUT_FUNCTIONALS = dict.fromkeys(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu multi_head_attention_forward".split(),
    "training",
)
_WRITING_FUNCTIONALS = {
    "batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": ("use_input_stats", ("running_mean", "running_var")),
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("weight",)),
}
_PLAIN_METHODS = frozenset(
    "dim ndimension nelement numel size stride is_contiguous get_device element_size storage_offset item tolist "
    "__len__ __contains__ __bool__ __int__ __float__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ "
    "is_floating_point is_complex is_shared has_names new_tensor lower upper startswith endswith index count".split()
)
_PASSING_METHODS = frozenset(
    "float double half bfloat16 int long short bool char byte cfloat cdouble chalf cpu cuda type numpy data "
    "__getitem__ __iter__ sum_to_size keys values items get unflatten refine_names rename align_to".split()
)
_INPLACE_DUNDERS = frozenset(f"__{name.__name__}__" for name in _INPLACE_OPERATORS)


def function_rule(target: Any) -> Rule | None:
    """The rule of a ``call_function`` target; None where every call is plain.

    Higher-order operators are not handled here: their effects are those of their bodies.
    """
    if is_operator(target):
        return operator_rule(target)
    if inspect.ismethoddescriptor(target) and getattr(target, "__objclass__", None) is not None:
        return method_rule(target.__name__)
    if is_barrier_function(target):
        return lambda _node: Use(barrier=True, why=f"{target.__name__} changes global state")
    try:
        known = _python_rule(target)
    except TypeError:  # an unhashable callable
        known = NotImplemented
    if known is not NotImplemented:
        return known
    return _torch_rule(target)


def _python_rule(target: Any) -> Any:
    """The rule for the interpreter's own functions; NotImplemented where it is none of them."""
    if target in _INPLACE_OPERATORS:
        return _writes_first
    if target in _CONTAINER_OPERATORS:
        return _maybe_container
    if target is operator.getitem or target in _PASSING_BUILTINS:
        return _passes
    if target is print:
        return lambda _node: Use(host=True, why="print")
    if target in _PLAIN_BUILTINS or getattr(target, "__module__", None) in ("_operator", "operator", "math"):
        return None
    if target is math:
        return None
    return NotImplemented


def _torch_rule(target: Any) -> Rule | None:
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    unknown = f"unknown function {module}.{name}" if name else f"unknown callable {target!r}"
    if module == "torch.nn.functional":
        return _functional_rule(target, name)
    if module == "torch.functional":
        return _passes
    if module == "torch.nn.init":
        return lambda node: Use(writes=nodes_in(node.args[:1]), aliases=nodes_in(node.args[:1]), random=True, why=name)
    if module in ("torch", "torch.random", "torch.sym_node") or module.startswith("torch._C"):
        if name in _RANDOM_STATE:
            return lambda _node: Use(random=True, host=True, why=f"torch.{name}")
        packet = aten_packet(name)
        if packet is not None:
            return operator_rule(packet)
        if name in _PLAIN_TORCH or name.startswith("_sym_"):
            return None
        if name in ("_assert", "_check") or name.startswith("_check_"):
            return lambda _node: Use(host=True, why=f"torch.{name}")
        if name in ("as_tensor", "asarray", "from_numpy", "frombuffer"):
            return _passes
    return lambda node: opaque(node, unknown)


def _functional_rule(target: Any, name: str) -> Rule | None:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        packet = aten_packet(name)
        return operator_rule(packet) if packet is not None else (lambda node: opaque(node, f"unknown function {name}"))
    names = list(parameters)
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    flag = _DROPOUT_FUNCTIONALS.get(name)
    write_flag, written = _WRITING_FUNCTIONALS.get(name, ("", ()))
    if name not in _RANDOM_FUNCTIONALS and not flag and not written and "inplace" not in names:
        return None

    def value(node: Node, key: str) -> object:
        if key in node.kwargs:
            return node.kwargs[key]
        position = names.index(key)
        return node.args[position] if position < len(node.args) else defaults[key]

    def rule(node: Node) -> Use:
        writes: tuple[Node, ...] = ()
        if "inplace" in names and value(node, "inplace"):
            writes = nodes_in(value(node, names[0]))
        if written and value(node, write_flag) is not None and value(node, write_flag) is not False:
            writes += tuple(operand for key in written for operand in nodes_in(value(node, key)))
        random = name in _RANDOM_FUNCTIONALS or bool(flag and value(node, flag))
        passes = nodes_in(value(node, names[0])) if writes or flag else ()
        if not (writes or passes or random):
            return PLAIN
        return Use(writes=writes, aliases=passes, random=random, why=f"torch.nn.functional.{name}")

    return rule


def method_rule(name: str) -> Rule | None:
    """The rule of a ``call_method`` target; None where every call is plain."""
    if name in _INPLACE_DUNDERS:
        return _writes_first
    if name in _PASSING_METHODS:
        return _passes
    packet = aten_packet(name)
    if packet is not None:
        return operator_rule(packet)
    if name in _PLAIN_METHODS or not hasattr(torch.Tensor, name) and name.startswith("is_"):
        return None
    return lambda node: opaque(node, f"unknown method {name}")


def _writes_first(node: Node) -> Use:
    """``x += y`` and ``x[i] = y``: the first operand changes; a container also comes to hold the others."""
    return Use(writes=nodes_in(node.args[:1]), aliases=tuple(node.all_input_nodes), why=str(getattr(node.target, "__name__", node.target)))


def _passes(node: Node) -> Use:
    return Use(aliases=tuple(node.all_input_nodes))


def _maybe_container(node: Node) -> Use:
    """``a + b`` of two lists hands their items on; of tensors it computes a fresh one."""
    operands = nodes_in(node.args)
    if any(isinstance(value, (list, tuple)) for value in node.args) or any(_holds_items(operand) for operand in operands):
        return Use(aliases=operands)
    return PLAIN


def _holds_items(node: Node, depth: int = 4) -> bool:
    """Whether a node's value is, or may be, a list or tuple of tensors."""
    for key in ("val", "example_value"):
        if key in node.meta:
            return isinstance(node.meta[key], (list, tuple))
    if node.op == "placeholder":
        return any(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
    if node.op == "call_method":
        return node.target in ("split", "chunk", "unbind", "tensor_split", "values", "items", "size")
    if node.op == "call_function" and node.target in (operator.add, operator.mul) and depth:
        return any(_holds_items(operand, depth - 1) for operand in nodes_in(node.args))
    name = getattr(node.target, "__name__", "")
    return name in ("list", "tuple", "split", "chunk", "unbind", "tensor_split", "meshgrid", "broadcast_tensors")
