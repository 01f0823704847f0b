"""Facts about torch's operators, read from their schemas and tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._higher_order_ops.effects import has_effects
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "ArgumentFacts",
    "OpFacts",
    "always_aliased",
    "aten_packet",
    "is_higher_order",
    "is_in_place",
    "is_operator",
    "operator_facts",
    "returns_one_tensor",
]

_MAY_ALIAS = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)

# Operators that write these arguments, though their schemas, older than such annotations, don't say so.
_UNDECLARED_WRITES: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "aten::batch_norm",
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::_batch_norm_impl_index",
        "aten::instance_norm",
    ),
    ("running_mean", "running_var"),
)
# The schema declares an RNG or a write, but only while the named flag is on; a literal False switches it off.
_SWITCHES: dict[str, str] = {
    "aten::dropout": "train",
    "aten::feature_dropout": "train",
    "aten::alpha_dropout": "train",
    "aten::feature_alpha_dropout": "train",
    "aten::native_dropout": "train",
    "aten::rrelu": "training",
    "aten::rrelu_with_noise": "training",
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::lstm": "train",
    "aten::gru": "train",
    "aten::rnn_tanh": "train",
    "aten::rnn_relu": "train",
}
_DROPOUT = "dropout_p"
"""Attention in any form draws where this is not 0, whatever the kernel."""
# Unannotated operators that hand back (a view of) what they were given.
_UNDECLARED_ALIASES = frozenset(
    f"aten::{name}"
    for name in [
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsafe_chunk",
        "_unsafe_view",
        "einsum",
        "meshgrid",
        "broadcast_tensors",
        "type_as",
        "histogramdd",
        "sum_to_size",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "cartesian_prod",
    ]
) | {"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"}
_COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
_RECURRENT = frozenset({"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"})


@dataclass(frozen=True, slots=True)
class ArgumentFacts:
    """What an operator does with one argument."""

    position: int
    name: str
    written: bool
    aliased: bool
    """The result may share storage with it."""
    keyword_only: bool

    def value_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call with these arguments gives for it; None where it gives nothing."""
        if self.name in kwargs:
            return kwargs[self.name]
        return None if self.keyword_only or self.position >= len(args) else args[self.position]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What an operator overload does beyond computing a fresh value."""

    name: str
    arguments: tuple[ArgumentFacts, ...]
    """Only those that are written or aliased."""
    may_alias_all: bool
    """The result may share storage with any argument, and the schema does not say which."""
    random: bool
    switch: tuple[int, str] | None
    """Position and name of the flag that, when false, makes the operator neither random nor mutating."""
    returns_nothing: bool
    ordered: bool = False
    """Its calls can be told apart from outside by their order: a collective, an operator registered as
    effectful.
    """
    rebinds: bool = False
    """Afterwards a written argument lies on the storage of another argument."""

    @property
    def is_pure(self) -> bool:
        """Whether it computes a fresh value and does nothing else."""
        return not (
            self.arguments or self.may_alias_all or self.random or self.returns_nothing or self.ordered
        )


def is_operator(target: object) -> bool:
    """Whether ``target`` is an operator overload or packet such as ``torch.ops.aten.add[.Tensor]``."""
    return isinstance(target, (OpOverload, OpOverloadPacket))


def is_higher_order(target: object) -> bool:
    """Whether ``target`` is a higher-order operator, one that takes graphs as arguments."""
    return isinstance(target, HigherOrderOperator)


def aten_packet(name: str) -> OpOverloadPacket | None:
    """The ATen operator packet of that name, or None."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return packet if isinstance(packet, OpOverloadPacket) else None


@cache
def returns_one_tensor(target: Any) -> bool:
    """Whether an overload, or every overload of a packet that takes a tensor first, returns a single
    tensor.
    """
    overloads = (
        [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in target.overloads()]
    )
    schemas = [overload._schema for overload in overloads]
    relevant = [
        schema for schema in schemas if schema.arguments and "Tensor" in str(schema.arguments[0].type)
    ] or schemas
    return all(len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor" for schema in relevant)


@cache
def always_aliased(target: Any) -> bool:
    """Whether the result of an overload always lies on the storage of its first argument: a view, or an
    operator in place.
    """
    if not isinstance(target, OpOverload) or not returns_one_tensor(target):
        return False
    facts = _overload_facts(target)
    return not facts.may_alias_all and any(
        argument.position == 0 and argument.aliased for argument in facts.arguments
    )


@cache
def is_in_place(target: Any) -> bool:
    """Whether an overload writes to its first argument and returns it."""
    return always_aliased(target) and any(
        argument.position == 0 and argument.written for argument in _overload_facts(target).arguments
    )


@cache
def operator_facts(target: Any) -> tuple[OpFacts, ...]:
    """The facts of an overload, or of every overload of a packet."""
    if isinstance(target, OpOverload):
        return (_overload_facts(target),)
    overloads = [getattr(target, name) for name in target.overloads()]
    # TorchScript's list methods share packets with tensor operators: `aten::sort.any(t[](a!) self, ...)`.
    of_tensors = [overload for overload in overloads if not _is_list_method(overload)]
    return tuple(_overload_facts(overload) for overload in of_tensors or overloads)


def _is_list_method(overload: OpOverload) -> bool:
    arguments = overload._schema.arguments
    return bool(arguments) and arguments[0].name == "self" and str(arguments[0].type).startswith("List[")


def _overload_facts(overload: OpOverload) -> OpFacts:
    schema = overload._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    facts = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        written = (alias is not None and alias.is_write) or argument.name in undeclared
        # what returns nothing here may return what it wrote where Python calls it: torch._foreach_add_
        aliased = (alias is not None and _reaches_result(alias, schema)) or (written and not schema.returns)
        if written or aliased:
            facts.append(ArgumentFacts(position, argument.name, written, aliased, argument.kwarg_only))
    switch_name = _SWITCHES.get(schema.name, _DROPOUT)
    switch = next(
        (
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.name == switch_name
        ),
        None,
    )
    may_alias = (
        _MAY_ALIAS in overload.tags
        if _MAY_ALIAS is not None
        else overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )
    return OpFacts(
        name=schema.name,
        arguments=tuple(facts),
        may_alias_all=may_alias or schema.name in _UNDECLARED_ALIASES,
        random=torch.Tag.nondeterministic_seeded in overload.tags or schema.name in _RECURRENT,
        switch=switch,
        returns_nothing=not schema.returns,
        ordered=schema.name.partition("::")[0] in _COLLECTIVES or has_effects(overload),
        rebinds=schema.name in ("aten::set_", "aten::set_data"),
    )


def _reaches_result(alias: Any, schema: Any) -> bool:
    """Whether an annotated argument may come back as (part of) the result."""
    if not alias.is_write:
        return True  # a read-only annotation exists for no other reason
    if "*" in alias.after_set:
        return True
    return any(
        result.alias_info is not None
        and alias.before_set & (result.alias_info.before_set | result.alias_info.after_set)
        for result in schema.returns
    )
