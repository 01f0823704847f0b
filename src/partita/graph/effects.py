"""What each node of a graph does besides computing its value.

Terms:
    effect: what one node does: storages that it writes, operands that its value may alias, random numbers,
        side effects (see `NodeEffect`). A pure node has none.
    rule: a function from a node to its effect, looked up once per target. Rules come from operator schemas,
        from tables for Python functions and from known modules. Unknown code counts as reading and writing
        all that it is given (see `opaque`).
    storage id: an integer for memory that values may share. Every node has the ids of the storages that its
        value may occupy (see `storages`).
    region: nodes between two switches of grad mode, inference mode or autocast (see `regions`).
    body: a nested graph that a node calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import REGION_SWITCHES, SET_GRAD
from partita._torch.operators.schemas import is_higher_order, is_operator, operator_facts
from partita._torch.tensors.storage import storage_key
from partita.graph.attributes import lookup
from partita.graph.effect_rules.functions import function_rule, method_rule
from partita.graph.effect_rules.modules import module_effect
from partita.graph.effect_rules.node_effect import PURE, NodeEffect, Rule, combined, opaque
from partita.graph.storages import find_storages, metadata

__all__ = ["Effects", "analyse", "metadata"]


@dataclass(frozen=True)
class Effects:
    """The effects of all nodes of one graph.

    Attributes:
        nodes: all nodes in order.
        index: position of each node.
        by_position: the effects of the nodes that are not pure.
        storages: ids of the storages that a node's value may occupy, by position; an empty list where no node
            writes anything.
        regions: positions of the nodes that enter or leave a grad, inference or autocast region.
        state_storages: from the storage key of a module's tensor to the id used in ``storages``.
    """

    nodes: list[Node]
    index: dict[Node, int]
    by_position: dict[int, NodeEffect]
    storages: list[tuple[int, ...]] = field(repr=False)
    regions: tuple[int, ...] = ()
    state_storages: dict[int, int] = field(default_factory=dict, repr=False)

    def storages_of(self, nodes: Iterable[Node]) -> Iterator[int]:
        """Return the ids of the storages that the nodes' values may occupy; none where no node writes."""
        located = nodes if self.storages else ()
        return (identity for node in located for identity in self.storages[self.index[node]])

    def storages_written(self, effect: NodeEffect) -> Iterator[int]:
        """Return the ids of the storages that a node with this effect writes."""
        yield from self.storages_of(effect.writes)
        for tensor in effect.written_state:
            yield self.state_storages[storage_key(tensor)]

    @property
    def writers(self) -> list[int]:
        """Positions of the nodes that write a storage."""
        return [
            position for position, effect in self.by_position.items() if effect.writes or effect.written_state
        ]

    @property
    def written(self) -> set[int]:
        """Ids of the storages that nodes write."""
        return {storage for effect in self.by_position.values() for storage in self.storages_written(effect)}

    @property
    def random(self) -> list[int]:
        """Positions of the nodes that draw random numbers."""
        return [position for position, effect in self.by_position.items() if effect.random]


def analyse(gm: GraphModule, *, distinct_inputs: bool = False, doubt_inputs: bool = False) -> Effects:
    """Return the effects of every node of ``gm``, in time linear in nodes and edges.

    Args:
        distinct_inputs: assume that no two inputs share memory. Otherwise inputs without metadata may.
        doubt_inputs: inputs with metadata may as well: a graph may be called with other arguments than those
            that it was traced with.

    >>> import torch
    >>> gm = torch.fx.symbolic_trace(lambda x: x.add_(1) * 2)
    >>> [effects.nodes[i].name for effects in [analyse(gm)] for i in effects.writers]
    ['add_']
    """
    return _Analysis(gm, distinct_inputs=distinct_inputs, doubt_inputs=doubt_inputs).run()


class _Analysis:
    """The working state of one `analyse` call."""

    def __init__(self, gm: GraphModule, *, distinct_inputs: bool, doubt_inputs: bool) -> None:
        self.gm = gm
        self.distinct_inputs = distinct_inputs
        self.doubt_inputs = doubt_inputs
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.index = {node: position for position, node in enumerate(self.nodes)}
        self.function_rules: dict[Any, Rule | None] = {}
        self.method_rules: dict[str, Rule | None] = {}
        self.bodies: dict[int, NodeEffect] = {}

    def run(self) -> Effects:
        by_position: dict[int, NodeEffect] = {}
        regions: list[int] = []
        rules = self.function_rules
        writes = False
        # Phase 1: apply each node's rule. A function without a rule is pure, and costs one lookup.
        for position, node in enumerate(self.nodes):
            if node.op == "call_function":
                try:
                    rule = rules[node.target]
                except (KeyError, TypeError):  # not seen before, or an unhashable callable
                    rule = self._function_rule(node.target)
                if rule is None:
                    continue
                if rule is _switches_region:
                    regions.append(position)
                    continue
            elif node.op == "call_method":
                rule = self._method_rule(str(node.target))
            elif node.op == "call_module":
                rule = self._called_module
            else:
                continue
            effect = PURE if rule is None else rule(node)
            if effect is not PURE:
                by_position[position] = effect
                writes = writes or bool(effect.writes or effect.written_state)
        # Phase 2: who may share memory. It matters only where some node writes.
        if not writes:
            return Effects(self.nodes, self.index, by_position, [], tuple(regions))
        storages, state = find_storages(
            self.gm,
            self.nodes,
            self.index,
            by_position,
            distinct_inputs=self.distinct_inputs,
            doubt_inputs=self.doubt_inputs,
        )
        return Effects(self.nodes, self.index, by_position, storages, tuple(regions), state)

    def _function_rule(self, target: Any) -> Rule | None:
        if target in REGION_SWITCHES:
            rule: Rule | None = _switches_region
        elif is_higher_order(target):
            rule = self._higher_order_effect
        else:
            rule = function_rule(target)
        with suppress(TypeError):  # an unhashable callable
            self.function_rules[target] = rule
        return rule

    def _method_rule(self, name: str) -> Rule | None:
        if name not in self.method_rules:
            self.method_rules[name] = method_rule(name)
        return self.method_rules[name]

    def _called_module(self, node: Node) -> NodeEffect:
        return module_effect(lookup(self.gm, node), node, self._graph_effect)

    def _higher_order_effect(self, node: Node) -> NodeEffect:
        """A higher-order operator does what its bodies do, to the operands that it hands them."""
        name = getattr(node.target, "__name__", str(node.target))
        operands = tuple(node.all_input_nodes)
        # Operators that wrap one ATen operator or kernel instead of a body.
        if name in ("run_and_save_rng_state", "run_with_rng_state"):
            return self._replayed(node, name)
        if name.startswith("auto_functionalized") and node.args and is_operator(node.args[0]):
            wrapped: Any = node.args[0]
            facts = operator_facts(wrapped)
            random, host = any(one.random for one in facts), any(one.ordered for one in facts)
            return (
                NodeEffect(random=random, host=host, why=f"{name} of {wrapped}") if random or host else PURE
            )
        if name in ("out_dtype", "triton_kernel_wrapper_functional") or (
            name == "flat_apply" and _INDEXING_OF_MASKS in node.args
        ):
            return PURE
        if name == "with_effects":
            return NodeEffect(host=True, why=name)
        if name == "triton_kernel_wrapper_mutation":
            return NodeEffect(writes=operands, why=name)
        # All others: the union of their bodies.
        attributes = [lookup(self.gm, operand) for operand in operands if operand.op == "get_attr"]
        bodies = [self._body(value) for value in attributes if isinstance(value, GraphModule)]
        if not bodies:
            return opaque(node, f"higher-order operator {name} without a graph to look into")
        written = operands if any(body.writes for body in bodies) else ()
        why = f"{name}: " + "; ".join(body.why for body in bodies if body.observable)
        return combined(bodies, written, operands, why)

    def _replayed(self, node: Node, name: str) -> NodeEffect:
        """An operator that runs twice from one state of the generator, as recomputation in backward does."""
        operators: list[Any] = [value for value in node.args[:2] if is_operator(value)]
        if not operators or any(
            argument.written for facts in operator_facts(operators[0]) for argument in facts.arguments
        ):
            return opaque(node, f"higher-order operator {name} of an operator that writes")
        return NodeEffect(aliases=tuple(node.all_input_nodes), random=True, why=f"{name} of {operators[0]}")

    def _graph_effect(self, graph: GraphModule, node: Node) -> NodeEffect:
        """A call of a nested graph: what its body does, to the operands."""
        body = self._body(graph)
        operands = tuple(node.all_input_nodes)
        return combined([body], operands if body.writes else (), operands, f"{node.target}: {body.why}")

    def _body(self, graph: GraphModule) -> NodeEffect:
        """The summary of a nested graph: ``writes`` is non-empty where any of its inputs may be written."""
        if id(graph) in self.bodies:
            return self.bodies[id(graph)]
        self.bodies[id(graph)] = NodeEffect()  # a graph that contains itself adds nothing new
        analysed = analyse(graph)
        effects = analysed.by_position.values()
        written_ids: set[int] = set()
        if analysed.storages:
            written_ids.update(*(analysed.storages_of(effect.writes) for effect in effects))
        inputs = [
            node
            for position, node in enumerate(analysed.nodes)
            if written_ids
            and node.op == "placeholder"
            and written_ids.intersection(analysed.storages[position])
        ]
        values = (lookup(graph, node) for node in analysed.nodes if node.op == "get_attr")
        state = [value for value in values if isinstance(value, torch.Tensor)]
        written_state = [
            tensor for tensor in state if analysed.state_storages.get(storage_key(tensor)) in written_ids
        ]
        # whether grad mode is left changed depends on the caller, so a body that sets it is not moved
        leaks = any(analysed.nodes[position].target is SET_GRAD for position in analysed.regions)
        why = "; ".join(dict.fromkeys(effect.why for effect in effects if effect.observable))
        summary = combined(effects, inputs, (), why)
        self.bodies[id(graph)] = replace(
            summary,
            state=(*state, *summary.state),
            written_state=(*written_state, *summary.written_state),
            barrier=summary.barrier or leaks,
        )
        return self.bodies[id(graph)]


_INDEXING_OF_MASKS = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"
"""A function of torch's own, by which strict traces index tensors in the masks of FlexAttention."""


def _switches_region(_node: Node) -> NodeEffect:
    """The rule of region switches; recognised by identity, since they are re-entered and not moved."""
    return PURE
