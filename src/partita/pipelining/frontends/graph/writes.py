"""Memory that a model writes to: what may not be cut through, and what a stage must be given a copy of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.tensors.storage import storage_key
from partita.errors import CaptureError
from partita.graph.effects import Effects, analyse, metadata
from partita.graph.state import lookup

__all__ = ["check_writes", "reused_outputs", "written_inputs"]


def check_writes(gm: GraphModule, assignment: dict[str, int]) -> None:
    """Refuse a cut through memory that is written: stages run in processes of their own and don't share it.

    A stage hands out what it made as it is when the stage is done, so later stages see all of its writes.
    They do not see what another stage writes to the same memory after that, and two values that share memory
    in one stage don't in the next.

    Args:
        assignment: the stage of each node that computes; stages follow one another in the graph.

    Raises:
        CaptureError: names the node that writes, the tensor, and the stages.
    """
    effects = analyse(gm)
    if not effects.storages:
        return
    shares = _Shares(effects)
    uses = _uses(effects, shares, assignment)
    for position in effects.writers:
        node = effects.nodes[position]
        stage = assignment[node.name]
        for operand, memory in shares.written(position):
            stages = _stages_that_miss_it(stage, uses.get(memory, []), assignment)
            if stages:
                raise CaptureError(
                    f"{node.name!r} writes to {_described(gm, operand)} in stage {stage}, and stages "
                    f"{sorted({stage, *stages})} use the same memory, which they can't share across "
                    "processes: cut so that one stage has all of its uses, or write to a copy"
                )


@dataclass(frozen=True, slots=True)
class _Use:
    """A value that a stage uses, or that the model returns (that is the last stage's to do)."""

    stage: int
    value: Node
    returned: bool = False


def _uses(effects: Effects, shares: _Shares, assignment: dict[str, int]) -> dict[_Memory, list[_Use]]:
    """Who uses each memory. The caller's side of an input counts as stage 0."""
    uses: dict[_Memory, list[_Use]] = {}
    last = max(assignment.values())
    for node in effects.nodes:
        returned = node.op == "output"
        for operand in [node] if node.op == "placeholder" else node.all_input_nodes:
            use = _Use(last if returned else assignment.get(node.name, 0), operand, returned)
            for memory in shares.of(operand):
                uses.setdefault(memory, []).append(use)
    return uses


def _stages_that_miss_it(writer: int, uses: list[_Use], assignment: dict[str, int]) -> set[int]:
    """The stages that a write in stage ``writer`` does not reach as it would in the whole model."""
    made = {use.value: assignment.get(use.value.name, 0) for use in uses}
    entering = {use.value for use in uses if use.stage == writer and made[use.value] < writer}
    missing = set()
    for use in uses:
        if use.value.op == "get_attr":
            misses = use.stage != writer
        elif use.value.op == "placeholder":
            misses = writer != 0 or use.stage != 0
        else:
            apart = use.stage > writer or use.returned or (use.stage == writer and len(entering) > 1)
            misses = made[use.value] < writer and apart
        if misses:
            missing.add(use.stage if use.stage != writer else made[use.value])
    return missing


_Memory = tuple[int, int | None]
"""The id of a storage as `analyse` sees it, and where the examples of its values lie (None: unknown)."""


class _Shares:
    """Which memory a value lies in. An operator such as batch norm may return its input, for all that its
    schema says; where example values show that it does not, it does not. Dropout does in evaluation: where
    the graph asks the module for the mode, the example of one mode says nothing about the other.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._trusted = not any(use.entangles for use in effects.uses.values())
        self._same: dict[_Memory, _Memory] = {}
        self._parts: dict[int, set[_Memory]] = {}
        for node in effects.nodes:
            key = _key(node)
            for identity in effects.storages[effects.index[node]] if key is not None else ():
                self._parts.setdefault(identity, set()).add((identity, key))
        for position, use in effects.uses.items():
            if any(self._is_flag(operand) for operand in use.aliases):
                self._unite(effects.nodes[position], use.aliases)

    def of(self, node: Node) -> set[_Memory]:
        """Where the value of ``node`` lies, or may lie."""
        own, key = self._effects.storages[self._effects.index[node]], _key(node)
        if key is not None and self._trusted:
            return {self._root((identity, key)) for identity in own}
        if not self._trusted:
            return {(identity, None) for identity in own}
        parts = (self._parts.get(identity, {(identity, None)}) for identity in own)
        return {self._root(part) for part in chain.from_iterable(parts)}

    def written(self, position: int) -> list[tuple[Node, _Memory]]:
        """What the writer at ``position`` writes: the operand, and where it lies."""
        return [
            (operand, memory)
            for operand in self._effects.uses[position].writes
            for memory in sorted(self.of(operand), key=repr)
        ]

    def all_written(self) -> set[_Memory]:
        """Whatever anybody writes."""
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
    value = metadata(node)
    return storage_key(value) if isinstance(value, Tensor) else None


def written_inputs(stage: GraphModule) -> frozenset[str]:
    """Names of the inputs of a stage that it writes to."""
    effects = analyse(stage)
    if not effects.storages:
        return frozenset()
    written = {
        identity
        for position in effects.writers
        for operand in effects.uses[position].writes
        for identity in effects.storages[effects.index[operand]]
    }
    inputs = (node for node in effects.nodes if node.op == "placeholder")
    return frozenset(
        node.name for node in inputs if written.intersection(effects.storages[effects.index[node]])
    )


def reused_outputs(stage: GraphModule) -> frozenset[int]:
    """Positions of the outputs of a stage that lie in a buffer of its own that it writes to."""
    effects = analyse(stage)
    if not effects.storages:
        return frozenset()
    shares = _Shares(effects)
    own = {memory for node in effects.nodes if node.op == "get_attr" for memory in shares.of(node)}
    reused = own & shares.all_written()
    results = effects.nodes[-1].args[0]
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    return frozenset(
        number
        for number, result in enumerate(flat)
        if isinstance(result, Node) and reused.intersection(shares.of(result))
    )


def _described(gm: GraphModule, operand: Node) -> str:
    if operand.op == "get_attr" and isinstance(lookup(gm, operand), Tensor):
        return f"the buffer {operand.target!r}"
    if operand.op == "placeholder":
        return f"the model's input {operand.name!r}"
    return f"the value {operand.name!r}"
