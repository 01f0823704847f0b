"""A stage's graph as a function of its state and its inputs, so that equal stages are one function.

::

    stage 1   x ── linear(blocks.1.weight) ──                x, state_0 ── linear ──     called with what
    stage 2   x ── linear(blocks.2.weight) ──      both:                                 each stage holds

Random calls are numbered from 0 in it; the stage's first number is added when it runs (see `sites_from`).

A parameter that other stages hold too, and an input that goes on to a later stage, is an argument for each of
its uses (see `each_use`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils.checkpoint import checkpoint

from partita._torch.autograd.region_switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import LazyGraphModule, lazy_module, use_flat_signature
from partita.graph.ancestors import ancestors
from partita.graph.attributes import attribute
from partita.graph.effect_rules.conditions import reads_condition
from partita.graph.effect_rules.node_effect import NodeEffect
from partita.graph.effects import Effects, analyse
from partita.graph.structure import structural_hash
from partita.pipelining.compiled.each_use import (
    repeat_inputs,
    repeat_what_changes_nothing,
    replace_each,
    times_in,
)
from partita.pipelining.recompute.region import CheckpointedRegion
from partita.runtime import enter_site
from partita.splitter.building.install import attributes_of, install

__all__ = ["STATE", "StatelessGraph", "stateless"]

STATE = "partita_state_"
"""How the arguments that stand for state are called; a number follows."""


@dataclass(frozen=True, eq=False)
class StatelessGraph:
    """A stage's graph without its state.

    Attributes:
        module: takes the state, then the inputs.
        state: qualified names of the parameters, buffers and constants, in order.
        repeated: positions in `state` of the uses of parameters that are arguments for each use.
        repeated_inputs: positions of the inputs that stand, once for each use, between state and conditions.
        flags: the modules whose training flag is written into the graph, by name, with that flag.
        first_site: the number of the stage's first random call.
        hash: equal for equal graphs.
        conditions: takes the state and the inputs, and returns what the host reads from tensors (``if
            mask.all():``), which `module` takes between state and inputs; None where nothing is read.
    """

    module: LazyGraphModule
    state: tuple[str, ...]
    flags: tuple[tuple[str, bool], ...]
    first_site: int
    hash: str
    conditions: LazyGraphModule | None = None
    repeated: tuple[int, ...] = ()
    repeated_inputs: tuple[int, ...] = ()


def stateless(graph: GraphModule, owner: nn.Module, shared: Collection[str] = ()) -> StatelessGraph:
    """Return the function that a stage's graph is.

    Args:
        graph: of one mode.
        owner: holds what it refers to.
        shared: the names of parameters that other stages hold too, and of inputs that go on to later ones.
    """
    copy = copy_graph(graph.graph)
    _put_bodies_in(copy, owner)
    repeat_what_changes_nothing(copy, shared)
    use_flat_signature(copy)
    module = lazy_module(copy, "StatelessStage", training=graph.training)
    # One argument for each tensor of the state, in the order of first use; where autograd must see each use
    # by itself, one for each use.
    state: list[str] = []
    flags: list[tuple[str, bool]] = []
    # where arguments go; a stage that is computed of its state alone has no inputs to put them before
    start = next(node for node in copy.nodes if node.op != "get_attr")
    by_tensor: dict[int, Node] = {}
    repeated: list[int] = []
    uses: Counter[int] = Counter()
    for node in copy.find_nodes(op="get_attr"):
        uses[id(attribute(owner, node).value)] += sum(times_in(user, node) for user in node.users)
    candidates = (
        parameter for name, parameter in owner.named_parameters(remove_duplicate=False) if name in shared
    )
    each_use = {id(parameter) for parameter in candidates if uses[id(parameter)] > 1}
    graphs, recomputed = [copy], list[str]()

    def argument_for(node: Node) -> Node:
        with copy.inserting_before(start):
            argument = copy.placeholder(f"{STATE}{len(state)}")
        argument.meta = dict(node.meta)
        state.append(str(node.target))
        return argument

    for node in list(copy.nodes):
        if node.op == "call_module":
            graphs += _take_child(module, owner, node, recomputed)
            continue
        if node.op != "get_attr":
            continue
        value = attribute(owner, node).value
        if isinstance(value, torch.Tensor):
            if id(value) in each_use:
                for user in sorted(node.users):
                    places = range(len(state), len(state) + times_in(user, node))
                    repeated.extend(places)
                    replace_each(user, node, [argument_for(node) for _ in places])
            else:
                if id(value) not in by_tensor:
                    by_tensor[id(value)] = argument_for(node)
                node.replace_all_uses_with(by_tensor[id(value)])
        elif isinstance(value, nn.Module):
            graphs += _take_child(module, owner, node, recomputed)
            continue
        else:
            if isinstance(value, bool) and str(node.target).rpartition(".")[2] == "training":
                flags.append((str(node.target), value))
            _write_in(node, value)
        copy.erase_node(node)
    # Equal stages get equal code, and the compiler nothing that breaks the graph.
    repeated_inputs = repeat_inputs(copy, start, len(state), shared)
    for part in graphs:
        _count_by_function(part)
        _leave_out_unused_reads(part)
    first = _renumber_sites(graphs)
    for node in copy.find_nodes(op="call_module"):
        if node.target in recomputed:
            _read_outside(node, module.get_submodule(node.target))
    # What is read outside of the compiled function is read before it.
    conditions = _read_conditions_before(module, start)
    for name in recomputed:  # from here on what it does is unknown to an analysis
        module.add_module(name, RecomputedRegion(module.get_submodule(name)))
    key = structural_hash(copy, module)
    return StatelessGraph(
        module, tuple(state), tuple(flags), first, key, conditions, tuple(repeated), repeated_inputs
    )


def _read_outside(call: Node, body: nn.Module) -> None:
    """Read what the host reads in a body before the call of it, in place, where that changes nothing: what it
    is read from is computed in the graph too, and the answer is an operand.
    """
    assert isinstance(body, LazyGraphModule)
    graph = body.graph
    reads = [node for node in graph.nodes if reads_condition(node)]
    inputs, needed = graph.find_nodes(op="placeholder"), _needed_for(reads, graph)
    if not (reads and inputs) or call.kwargs or any(node.op == "get_attr" for node in needed):
        return
    if not _can_run_before(analyse(body), needed):
        return
    values = dict(zip(inputs, call.args, strict=True))
    for node in graph.nodes:
        if node in needed and node not in values:
            with call.graph.inserting_before(call):
                values[node] = call.graph.node_copy(node, values.__getitem__)
    for number, read in enumerate(reads):
        with graph.inserting_after(inputs[-1]):
            inputs.append(graph.placeholder(f"partita_condition_{number}"))
        read.replace_all_uses_with(inputs[-1])
        graph.erase_node(read)
    call.args = (*call.args, *(values[read] for read in reads))
    body.recompile()


def _read_conditions_before(module: LazyGraphModule, start: Node) -> LazyGraphModule | None:
    """Take what the host reads out of a graph, in place: a compiler would have to break the graph there, and
    so it compiles one for each answer.

    Args:
        start: the graph's first input, or first node where it has none.
    """
    graph = module.graph
    reads = [node for node in graph.nodes if reads_condition(node)]
    needed = _needed_for(reads, graph)
    if not reads or not _can_run_before(analyse(module), needed):
        return None
    names = {node.name for node in needed}
    reading = copy_graph(graph)
    results = tuple(node for node in reading.nodes if node.name in {read.name for read in reads})
    reading.output_node().args = (results,)
    for node in reversed(list(reading.nodes)):
        if node.name not in names and node.op not in ("placeholder", "output"):
            reading.erase_node(node)
    before = lazy_module(reading, "Conditions", training=module.training)
    install(before, attributes_of(module, reading.nodes))
    for number, read in enumerate(reads):
        with graph.inserting_before(start):
            argument = graph.placeholder(f"partita_condition_{number}")
        read.replace_all_uses_with(argument)
    for read in reads:  # one may be where the arguments went
        graph.erase_node(read)
    return before


def _needed_for(reads: Collection[Node], graph: Graph) -> set[Node]:
    """What conditions are computed from, and under which autocast."""
    switches = (node for node in graph.nodes if node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST))
    return ancestors([*reads, *switches])


def _can_run_before(effects: Effects, needed: Collection[Node]) -> bool:
    """Whether nobody sees it if nodes that conditions need run twice, the first time before all others: they
    may write, to memory that is made and written by them alone.
    """
    writes = {node: set(effects.storages_written(it)) for node, it in _effects_by_node(effects)}
    not_theirs = {storage for node, written in writes.items() if node not in needed for storage in written}
    outer = [node for node in effects.nodes if node.op in ("placeholder", "get_attr")]
    not_theirs_to_write = not_theirs.union(effects.storages_of(outer))
    for node, it in _effects_by_node(effects):
        if node not in needed or reads_condition(node):
            continue
        if it.random or it.host or it.barrier or not not_theirs_to_write.isdisjoint(writes[node]):
            return False
    return not_theirs.isdisjoint(effects.storages_of(needed))


def _effects_by_node(effects: Effects) -> list[tuple[Node, NodeEffect]]:
    return [(effects.nodes[position], it) for position, it in effects.by_position.items()]


def _write_in(node: Node, value: Any) -> None:
    for user in list(node.users):
        user.args = map_arg(user.args, lambda other: value if other is node else other)
        user.kwargs = map_arg(user.kwargs, lambda other: value if other is node else other)


def _put_bodies_in(graph: Graph, owner: nn.Module) -> None:
    """Put what is not computed again, and stands in a body of its own beside what is, into the graph, in
    place: what the host reads there is read before all (see `_read_conditions_before`).
    """
    for node in graph.find_nodes(op="call_module"):
        body = attribute(owner, node).value
        taken_apart = all(user.target is operator.getitem for user in node.users)
        if not isinstance(body, GraphModule) or node.kwargs or body.graph.find_nodes(op="get_attr"):
            continue
        (returned,) = body.graph.output_node().args
        if not isinstance(returned, Node) and not taken_apart:
            continue
        values = dict(zip(body.graph.find_nodes(op="placeholder"), node.args, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body.graph, values)
        if isinstance(results, Node):
            node.replace_all_uses_with(results)
        else:
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)


def _take_child(
    module: nn.Module, owner: nn.Module, node: Node, recomputed: list[str]
) -> list[torch.fx.Graph]:
    """Let the copy hold a child, a body without state, under a name of its own, which is added to
    `recomputed` where the child is that.

    Returns:
        Its graph, to be changed.
    """
    child = attribute(owner, node).value
    name = f"body_{sum(1 for _ in module.children())}"
    node.target = name
    body = child.body if isinstance(child, CheckpointedRegion) else child
    if not isinstance(body, GraphModule):
        module.add_module(name, child)
        return []
    own = lazy_module(copy_graph(body.graph), type(body).__name__, training=body.training)
    install(own, attributes_of(body, body.graph.nodes))
    module.add_module(name, own)
    if body is not child:
        recomputed.append(name)
    return [own.graph]


def _count_by_function(graph: Graph) -> None:
    """Let a function of torch's count elements, in place: a compiler traces it also where the count is a
    number; the operator, it refuses then.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_numel.default):
        node.target = torch.numel


def _leave_out_unused_reads(graph: Graph) -> None:
    """Leave out, in place, what the host reads from tensors for nothing: a size that the model computes as a
    tensor (``x.view(n, torch.div(x.size(1), 8, rounding_mode="trunc"), 8)``) is a number in the graph, and
    the read stays behind. A compiler would have to break the graph there.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
        if not node.users:
            graph.erase_node(node)


def _renumber_sites(graphs: Sequence[torch.fx.Graph]) -> int:
    nodes = [node for graph in graphs for node in graph.nodes if node.target is enter_site]
    first = min((int(node.args[0]) for node in nodes), default=0)
    for node in nodes:
        node.args = (node.args[0] - first,)
    return first


class RecomputedRegion(nn.Module):
    """A region as compilers know it: its backward graph computes it again, but for what it has drawn."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *operands: Any) -> Any:
        """Run the region."""
        return checkpoint(self.body, *operands, use_reentrant=False)
