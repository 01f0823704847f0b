"""Memory that a model writes to: what may not be cut through, and what a stage must be given a copy of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.storage import storage_key
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
    uses = _uses(effects, assignment)
    for position in effects.writers:
        node = effects.nodes[position]
        stage = assignment[node.name]
        for operand, identity in _written(effects, position):
            stages = _stages_that_miss_it(stage, uses.get(identity, []), assignment)
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


def _uses(effects: Effects, assignment: dict[str, int]) -> dict[int, list[_Use]]:
    """Who uses each storage. The caller's side of an input counts as stage 0."""
    uses: dict[int, list[_Use]] = {}
    shares, last = _Shares(effects), max(assignment.values())
    for node in effects.nodes:
        returned = node.op == "output"
        for operand in [node] if node.op == "placeholder" else node.all_input_nodes:
            use = _Use(last if returned else assignment.get(node.name, 0), operand, returned)
            for identity in shares.of(operand):
                uses.setdefault(identity, []).append(use)
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


class _Shares:
    """Which storages a value lies in. An operator such as batch norm may return its input, for all that its
    schema says; where example values show that it does not, it does not.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._trusted = not any(use.entangles for use in effects.uses.values())
        self._keys: dict[int, int] = {}
        for node in effects.nodes:
            own, key = effects.storages[effects.index[node]], _key(node)
            if len(own) == 1 and key is not None:
                self._keys.setdefault(own[0], key)

    def of(self, node: Node) -> list[int]:
        """Ids of the storages of the value of ``node``."""
        own, key = self._effects.storages[self._effects.index[node]], _key(node)
        if key is None or not self._trusted:
            return list(own)
        return [identity for identity in own if self._keys.get(identity, key) == key]


def _key(node: Node) -> int | None:
    value = metadata(node)
    return storage_key(value) if isinstance(value, Tensor) else None


def _written(effects: Effects, position: int) -> list[tuple[Node, int]]:
    """What the writer at ``position`` writes: the operand, and the id of the storage."""
    return [
        (operand, identity)
        for operand in effects.uses[position].writes
        for identity in effects.storages[effects.index[operand]]
    ]


def written_inputs(stage: GraphModule) -> frozenset[str]:
    """Names of the inputs of a stage that it writes to."""
    effects = analyse(stage)
    if not effects.storages:
        return frozenset()
    written = _written_storages(effects)
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
    own = {identity for node in effects.nodes if node.op == "get_attr" for identity in shares.of(node)}
    reused = own & _written_storages(effects)
    results = effects.nodes[-1].args[0]
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    return frozenset(
        number
        for number, result in enumerate(flat)
        if isinstance(result, Node) and reused.intersection(shares.of(result))
    )


def _written_storages(effects: Effects) -> set[int]:
    return {identity for position in effects.writers for _, identity in _written(effects, position)}


def _described(gm: GraphModule, operand: Node) -> str:
    if operand.op == "get_attr" and isinstance(lookup(gm, operand), Tensor):
        return f"the buffer {operand.target!r}"
    if operand.op == "placeholder":
        return f"the model's input {operand.name!r}"
    return f"the value {operand.name!r}"
