"""For every node: which storages it reads, writes and shares, and what else can be observed of it.

Rules come from operator schemas, fake tensors' storages where the metadata is there, known functions and
modules; what is unknown counts as reading and writing everything that it is given (see ``use.opaque``). One
pass; a rule is looked up once per target. Nothing given is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD,
)
from partita._torch.operators.schemas import is_higher_order, is_operator, operator_facts
from partita._torch.tensors.storage import storage_key
from partita.graph.functions import function_rule, method_rule
from partita.graph.modules import module_use
from partita.graph.state import lookup
from partita.graph.storages import find_storages, metadata
from partita.graph.use import PLAIN, Rule, Use, opaque

__all__ = ["Effects", "analyse", "metadata"]

_REGION_FUNCTIONS = (SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST, ENTER_INFERENCE, EXIT_INFERENCE)


@dataclass(frozen=True)
class Effects:
    """What the nodes of one graph do beyond computing values.

    Attributes:
        nodes: all nodes in order.
        index: position of each node.
        uses: only the nodes whose rule is not plain, by position.
        storages: ids of the storages that a node's value may occupy, by position; empty lists where no node
            writes anything.
        regions: positions of the nodes that enter or leave a grad, inference or autocast region.
    """

    nodes: list[Node]
    index: dict[Node, int]
    uses: dict[int, Use]
    storages: list[tuple[int, ...]] = field(repr=False)
    regions: tuple[int, ...] = ()
    state_storages: dict[int, int] = field(default_factory=dict, repr=False)
    """From the storage key of a module's tensor to the id used in `storages`."""

    @property
    def writers(self) -> list[int]:
        """Positions of the nodes that write a storage."""
        return [position for position, use in self.uses.items() if use.writes or use.written_state]

    @property
    def random(self) -> list[int]:
        """Positions of the nodes that draw random numbers."""
        return [position for position, use in self.uses.items() if use.random]


def analyse(gm: GraphModule, *, distinct_inputs: bool = False, doubt_inputs: bool = False) -> Effects:
    """Effects of every node of ``gm``, in time linear in nodes and edges.

    Args:
        distinct_inputs: take it that no two inputs share memory. Otherwise inputs without metadata may.
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
        self.bodies: dict[int, Use] = {}

    def run(self) -> Effects:
        uses: dict[int, Use] = {}
        regions: list[int] = []
        writes = False
        rules = self.function_rules
        for position, node in enumerate(self.nodes):
            if node.op == "call_function":
                target = node.target
                try:
                    rule = rules[target]
                except KeyError:
                    rule = rules[target] = self._rule(target)
                except TypeError:  # an unhashable callable
                    rule = self._rule(target)
                if rule is None:
                    continue
                if rule is _REGION:
                    regions.append(position)
                    continue
                use = rule(node)
            elif node.op == "call_method":
                key = (node.target,)
                if key not in rules:
                    rules[key] = method_rule(str(node.target))
                method = rules[key]
                if method is None:
                    continue
                use = method(node)
            elif node.op == "call_module":
                use = module_use(lookup(self.gm, node), node, self._graph_use)
            else:
                continue
            if use is not PLAIN:
                uses[position] = use
                writes = writes or bool(use.writes or use.written_state)
        if not writes:
            return Effects(self.nodes, self.index, uses, [], tuple(regions))
        storages, state = find_storages(
            self.gm,
            self.nodes,
            self.index,
            uses,
            distinct_inputs=self.distinct_inputs,
            doubt_inputs=self.doubt_inputs,
        )
        return Effects(self.nodes, self.index, uses, storages, tuple(regions), state)

    def _rule(self, target: Any) -> Rule | None:
        if target in _REGION_FUNCTIONS:
            return _REGION
        if is_higher_order(target):
            return self._higher_order_use
        return function_rule(target)

    def _higher_order_use(self, node: Node) -> Use:
        """A higher-order operator does what its bodies do, to the operands that it hands them."""
        name = getattr(node.target, "__name__", str(node.target))
        operands = tuple(node.all_input_nodes)
        bodies = [lookup(self.gm, operand) for operand in operands if operand.op == "get_attr"]
        graphs = [body for body in bodies if isinstance(body, GraphModule)]
        if name in ("run_and_save_rng_state", "run_with_rng_state"):
            return self._replayed(node, name)
        if name.startswith("auto_functionalized") and node.args and is_operator(node.args[0]):
            wrapped: Any = node.args[0]
            facts = operator_facts(wrapped)
            random, host = any(one.random for one in facts), any(one.ordered for one in facts)
            return Use(random=random, host=host, why=f"{name} of {wrapped}") if random or host else PLAIN
        if name in ("out_dtype", "triton_kernel_wrapper_functional"):
            return PLAIN
        if name == "with_effects":
            return Use(host=True, why=name)
        if name == "triton_kernel_wrapper_mutation":
            return Use(writes=operands, why=name)
        if not graphs:
            return opaque(node, f"higher-order operator {name} without a graph to look into")
        inner = [self._body(graph) for graph in graphs]
        return Use(
            writes=operands if any(use.writes for use in inner) else (),
            aliases=operands,
            state=tuple(tensor for use in inner for tensor in use.state),
            written_state=tuple(tensor for use in inner for tensor in use.written_state),
            random=any(use.random for use in inner),
            host=any(use.host for use in inner),
            barrier=any(use.barrier for use in inner),
            entangles=any(use.entangles for use in inner),
            why=f"{name}: " + "; ".join(use.why for use in inner if use.observable),
        )

    def _replayed(self, node: Node, name: str) -> Use:
        """An operator that is run twice from one state of the generator, as recomputation in backward
        does.
        """
        operators: list[Any] = [value for value in node.args[:2] if is_operator(value)]
        if not operators or any(
            argument.written for facts in operator_facts(operators[0]) for argument in facts.arguments
        ):
            return opaque(node, f"higher-order operator {name} of an operator that writes")
        return Use(aliases=tuple(node.all_input_nodes), random=True, why=f"{name} of {operators[0]}")

    def _graph_use(self, graph: GraphModule, node: Node) -> Use:
        """A call of a nested graph: what its body does, to the operands."""
        inner = self._body(graph)
        operands = tuple(node.all_input_nodes)
        return Use(
            writes=operands if inner.writes else (),
            aliases=operands,
            state=inner.state,
            written_state=inner.written_state,
            random=inner.random,
            host=inner.host,
            barrier=inner.barrier,
            entangles=inner.entangles,
            why=f"{node.target}: {inner.why}",
        )

    def _body(self, graph: GraphModule) -> Use:
        """The summary of a nested graph: ``writes`` is non-empty where any of its inputs may be written."""
        known = self.bodies.get(id(graph))
        if known is not None:
            return known
        self.bodies[id(graph)] = Use()  # a graph that contains itself adds nothing new
        effects = analyse(graph)
        inputs = [node for node in effects.nodes if node.op == "placeholder"]
        writes: tuple[Node, ...] = ()
        written_ids = {
            identity
            for use in effects.uses.values()
            for operand in use.writes
            for identity in (effects.storages[effects.index[operand]] if effects.storages else ())
        }
        if effects.storages:
            writes = tuple(
                node for node in inputs if written_ids.intersection(effects.storages[effects.index[node]])
            )
        held = [
            value
            for value in (lookup(graph, n) for n in effects.nodes if n.op == "get_attr")
            if isinstance(value, torch.Tensor)
        ]
        written_state = [
            value
            for value in held
            if written_ids and effects.state_storages.get(storage_key(value)) in written_ids
        ]
        uses = effects.uses.values()
        # whether grad mode is left changed depends on the caller, so a body that sets it is not moved
        leaks = any(effects.nodes[position].target is SET_GRAD for position in effects.regions)
        summary = Use(
            writes=writes,
            state=(*held, *(tensor for use in uses for tensor in use.state)),
            written_state=(*written_state, *(tensor for use in uses for tensor in use.written_state)),
            random=any(use.random for use in uses),
            host=any(use.host for use in uses),
            barrier=any(use.barrier for use in uses) or leaks,
            entangles=any(use.entangles for use in uses),
            why="; ".join(dict.fromkeys(use.why for use in uses if use.observable)),
        )
        self.bodies[id(graph)] = summary
        return summary


def _REGION(_node: Node) -> Use:  # noqa: N802  (a marker, compared by identity)
    return PLAIN
