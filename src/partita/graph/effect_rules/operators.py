"""Effect rules for ATen and custom operators, read from their schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch.fx import Node

from partita._torch.operators.schemas import OpFacts, operator_facts
from partita.graph.effect_rules.node_effect import PURE, NodeEffect, Rule, nodes_in

__all__ = ["CallRule", "operator_call_rule", "operator_rule"]

CallRule: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], NodeEffect]
"""From the arguments of a call to its effects."""


def operator_rule(target: Any) -> Rule | None:
    """Return the rule of an overload or a packet; None where every call is pure."""
    rule = operator_call_rule(target)
    return None if rule is None else lambda node: rule(node.args, node.kwargs)


def operator_call_rule(target: Any) -> CallRule | None:
    """Return the rule of an overload or a packet for the arguments of a call; None where every call is pure.

    A packet stands for all of its overloads: an argument counts as written where any overload that takes it
    writes it.
    """
    overloads = operator_facts(target)
    if all(facts.is_pure for facts in overloads):
        return None
    overloads = tuple(facts for facts in overloads if not facts.is_pure)
    random = any(facts.random for facts in overloads)
    host = all(facts.returns_nothing for facts in operator_facts(target))
    ordered = any(facts.ordered for facts in overloads)

    # Of most operators that is the overload which writes to ``out``: without keywords they are pure.
    by_keyword = not (random or host or ordered) and all(
        not (facts.may_alias_all or facts.rebinds)
        and all(argument.keyword_only for argument in facts.arguments)
        for facts in overloads
    )

    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NodeEffect:
        if by_keyword and not kwargs:
            return PURE
        effect = _effect(overloads, args, kwargs, random=random, host=host)
        return replace(effect, host=True, why=f"operator {overloads[0].name}") if ordered else effect

    return rule


def _effect(
    overloads: tuple[OpFacts, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    random: bool,
    host: bool,
) -> NodeEffect:
    writes: dict[Node, None] = {}
    aliases: dict[Node, None] = {}
    name = overloads[0].name
    for facts in overloads:
        off = _switched_off(facts, args, kwargs)
        random = random and not off
        if facts.may_alias_all:
            aliases.update(dict.fromkeys(nodes_in((args, kwargs))))
        for argument in facts.arguments:
            operands = nodes_in(argument.value_in(args, kwargs))
            if argument.written and not off:
                writes.update(dict.fromkeys(operands))
            if argument.aliased:
                aliases.update(dict.fromkeys(operands))
    out = nodes_in(kwargs.get("out"))  # Python takes one tuple where the schema has several arguments
    writes.update(dict.fromkeys(out))
    aliases.update(dict.fromkeys(out))
    if not (writes or aliases or random or host):
        return PURE
    # An operator that returns nothing and writes nothing is there for a side effect (an assertion, a print).
    host = host and not writes
    if any(facts.rebinds for facts in overloads):
        aliases.update(dict.fromkeys(nodes_in((args, kwargs))))
        return NodeEffect(tuple(writes), tuple(aliases), entangles=True, why=f"operator {name}")
    return NodeEffect(tuple(writes), tuple(aliases), random=random, host=host, why=f"operator {name}")


def _switched_off(facts: OpFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the flag that makes the operator random or mutating is a constant that is off."""
    if facts.switch is None:
        return False
    position, name = facts.switch
    if name in kwargs:
        value: object = kwargs[name]
    elif position < len(args):
        value = args[position]
    else:
        return True  # the default
    if value is None:
        return facts.name != "aten::native_dropout"  # there it means on
    return not isinstance(value, Node) and not value
