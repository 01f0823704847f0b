"""Memory that a model writes to: where it may not be cut, and which inputs and outputs must be copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.tensors.storage import storage_key
from partita.errors import CaptureError
from partita.graph.attributes import attribute, lookup
from partita.graph.effect_rules.conditions import choose
from partita.graph.effects import Effects, analyse
from partita.graph.storages import example_memory

__all__ = [
    "check_writes",
    "reused_outputs",
    "uncut_positions",
    "why_uncut",
    "written_apart",
    "written_inputs",
    "written_parameters",
]

_MOST_LOOKED_AT = 1_000_000
"""A value that most of a model writes to (``x += layer(x)``) may be cut anywhere, and seeing that would take
minutes.
"""


def check_writes(gm: GraphModule, assignment: Mapping[str, int]) -> None:
    """Check that no cut goes through memory that is written: stages run in processes that don't share it.

    A stage sends its outputs when it is done, so later stages see all of its writes. They do not see what
    another stage writes to the same memory after that, and two values that share memory in one stage don't in
    the next.

    Args:
        assignment: the stage of each node that computes; stages follow one another in the graph.

    Raises:
        CaptureError: names the node that writes, the tensor, and the stages.
    """
    effects = analyse(gm)
    if not effects.storages:
        return
    last = max(assignment.values())
    memory_of = _MemoryOf(effects)
    uses = _uses(effects, memory_of)

    def stage_of(node: Node) -> int:
        return last if node.op == "output" else assignment.get(node.name, 0)

    for position in effects.writers:
        node = effects.nodes[position]
        stage = assignment[node.name]
        for operand, memory in memory_of.written(position):
            stages = _stages_missing_write(stage, uses.get(memory, []), stage_of)
            if stages:
                raise written_apart(gm, node, operand, stage, stages)


def written_apart(
    gm: GraphModule, writer: Node, operand: Node, stage: int, others: Collection[int]
) -> CaptureError:
    """The error that says that ``writer`` writes to memory in ``stage`` which other stages use."""
    return CaptureError(
        f"{writer.name!r} writes to {_described(gm, operand)} in stage {stage}, and stages "
        f"{sorted({stage, *others})} use the same memory, which they can't share across "
        "processes: cut so that one stage has all of its uses, or write to a copy"
    )


def uncut_positions(gm: GraphModule) -> frozenset[int]:
    """Return the positions of the nodes after which even a single cut goes through written memory."""
    return frozenset(_uncut(gm))


def why_uncut(gm: GraphModule) -> str:
    """What is written to where the most places to cut lie between its uses, in words; empty for none."""
    names = Counter(_described(gm, operand) for operand in _uncut(gm).values())
    return (
        f"no cut can go between uses of {max(names, key=names.__getitem__)}, which is written to"
        if names
        else ""
    )


def _uncut(gm: GraphModule) -> dict[int, Node]:
    """For each position of `uncut_positions`, an operand in the memory that is written."""
    effects = analyse(gm)
    if not effects.storages:
        return {}
    memory_of = _MemoryOf(effects)
    writers: dict[_Memory, list[int]] = {}
    operands: dict[_Memory, Node] = {}
    for position in effects.writers:
        for operand, memory in memory_of.written(position):
            writers.setdefault(memory, []).append(position)
            operands.setdefault(memory, operand)
    uncut: dict[int, Node] = {}
    for memory, uses in _uses(effects, memory_of).items():
        ends = [effects.index[use.user] for use in uses] + writers.get(memory, [])
        span = range(min(ends), max(ends))
        if memory not in writers or len(span) * len(uses) * len(writers[memory]) > _MOST_LOOKED_AT:
            continue
        for cut in span:

            def stage_of(node: Node, cut: int = cut) -> int:
                return 0 if node.op == "placeholder" else int(effects.index[node] > cut)

            if any(_stages_missing_write(int(it > cut), uses, stage_of) for it in writers[memory]):
                uncut.setdefault(cut, operands[memory])
    return uncut


@dataclass(frozen=True, slots=True)
class _Use:
    """A use of a value by a node. The caller, who has the model's inputs, uses them where they come in."""

    user: Node
    value: Node


def _uses(effects: Effects, memory_of: _MemoryOf) -> dict[_Memory, list[_Use]]:
    """The uses of each memory."""
    uses: dict[_Memory, list[_Use]] = {}
    for node in effects.nodes:
        for operand in [node] if node.op == "placeholder" else node.all_input_nodes:
            for memory in memory_of.value(operand):
                uses.setdefault(memory, []).append(_Use(node, operand))
    return uses


def _stages_missing_write(writer: int, uses: list[_Use], stage_of: Callable[[Node], int]) -> set[int]:
    """The stages that a write in stage ``writer`` does not reach as it would in the whole model.

    Args:
        stage_of: the stage of a node; of the output, the last one.
    """
    producers = {use.value: stage_of(use.value) for use in uses}
    entering = {use.value for use in uses if stage_of(use.user) == writer and producers[use.value] < writer}
    missing = set()
    for use in uses:
        stage = stage_of(use.user)
        if use.value.op == "get_attr":
            misses = stage != writer
        elif use.value.op == "placeholder":
            misses = writer != 0 or stage != 0
        else:
            apart = stage > writer or use.user.op == "output" or (stage == writer and len(entering) > 1)
            misses = producers[use.value] < writer and apart
        if misses:
            missing.add(stage if stage != writer else producers[use.value])
    return missing


_Memory = tuple[int, int | None]
"""The number of a storage in `analyse`, and the storage of the example values in it (None: unknown)."""


class _MemoryOf:
    """The memory that each value lies in.

    By its schema an operator such as batch norm may return its input; example values show that it does not.
    They don't count where the graph reads the mode from the module: dropout returns its input in evaluation,
    which the example of training can't show.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._examples_count = not any(effect.entangles for effect in effects.by_position.values())
        self._same: dict[_Memory, _Memory] = {}
        self._parts: dict[int, set[_Memory]] = {}
        for node in effects.nodes:
            key = _key(node)
            for identity in effects.storages[effects.index[node]] if key is not None else ():
                self._parts.setdefault(identity, set()).add((identity, key))
        for position, effect in effects.by_position.items():
            node = effects.nodes[position]
            # what is chosen has the example of one of the two
            if node.target is choose or any(self._is_flag(operand) for operand in effect.aliases):
                self._unite(node, effect.aliases)

    def value(self, node: Node) -> set[_Memory]:
        """The memory that the value of ``node`` lies in, or may lie in."""
        own, key = self._effects.storages[self._effects.index[node]], _key(node)
        if key is not None and self._examples_count:
            return {self._root((identity, key)) for identity in own}
        if not self._examples_count:
            return {(identity, None) for identity in own}
        parts = (self._parts.get(identity, {(identity, None)}) for identity in own)
        return {self._root(part) for part in chain.from_iterable(parts)}

    def written(self, position: int) -> list[tuple[Node, _Memory]]:
        """The operands that the node at ``position`` writes to, each with its memory."""
        return [
            (operand, memory)
            for operand in self._effects.by_position[position].writes
            for memory in sorted(self.value(operand), key=repr)
        ]

    def all_written(self) -> set[_Memory]:
        """All memory that some node writes to."""
        return {memory for position in self._effects.writers for _, memory in self.written(position)}

    def _is_flag(self, node: Node) -> bool:
        return node.op == "get_attr" and not self._effects.storages[self._effects.index[node]]

    def _root(self, memory: _Memory) -> _Memory:
        while memory in self._same:
            memory = self._same[memory]
        return memory

    def _unite(self, node: Node, operands: Iterable[Node]) -> None:
        storages, index = self._effects.storages, self._effects.index
        for operand in operands:
            for identity in set(storages[index[node]]).intersection(storages[index[operand]]):
                one, other = (self._root((identity, _key(end))) for end in (node, operand))
                if one != other:
                    self._same[one] = other


def _key(node: Node) -> int | None:
    value = example_memory(node)
    return storage_key(value) if isinstance(value, Tensor) else None


def written_inputs(stage: GraphModule) -> frozenset[str]:
    """Return the names of the inputs that a stage writes to."""
    effects = analyse(stage)
    if not effects.storages:
        return frozenset()
    written = {
        identity
        for position in effects.writers
        for operand in effects.by_position[position].writes
        for identity in effects.storages[effects.index[operand]]
    }
    inputs = (node for node in effects.nodes if node.op == "placeholder")
    return frozenset(
        node.name for node in inputs if written.intersection(effects.storages[effects.index[node]])
    )


def written_parameters(gm: GraphModule) -> frozenset[str]:
    """Return the names of the parameters that a graph writes to."""
    effects = analyse(gm)
    if not effects.storages:
        return frozenset()
    memory_of = _MemoryOf(effects)
    written = memory_of.all_written()
    return frozenset(
        str(node.target)
        for node in gm.graph.find_nodes(op="get_attr")
        if written.intersection(memory_of.value(node)) and attribute(gm, node).kind == "parameter"
    )


def reused_outputs(stage: GraphModule) -> frozenset[int]:
    """Return the positions of the outputs of a stage that lie in a buffer of its own that it writes to."""
    effects = analyse(stage)
    if not effects.storages:
        return frozenset()
    memory_of = _MemoryOf(effects)
    own = {memory for node in effects.nodes if node.op == "get_attr" for memory in memory_of.value(node)}
    reused = own & memory_of.all_written()
    results = effects.nodes[-1].args[0]
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    return frozenset(
        number
        for number, result in enumerate(flat)
        if isinstance(result, Node) and reused.intersection(memory_of.value(result))
    )


def _described(gm: GraphModule, operand: Node) -> str:
    if operand.op == "get_attr" and isinstance(lookup(gm, operand), Tensor):
        return f"the {attribute(gm, operand).kind} {operand.target!r}"
    if operand.op == "placeholder":
        return f"the model's input {operand.name!r}"
    return f"the value {operand.name!r}"
