"""Where a forward graph is cut so that the hooks of torch's own DDP fire when its buckets are full.

forward    p3 used     p2 used       p1 used          backward runs the other way
ready                                                 p1, then p2, then p3
buckets    |---- p3 ---|------- p2, p1 --------|      as DDP fills them: p1, p2 | p3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from partita._torch.distributed.ddp_reducer import ReducerFacts, is_ignored
from partita.graph.effects import metadata

__all__ = ["Bucket", "assign_buckets", "group_by_caps"]


@dataclass
class Bucket:
    """One piece of a forward graph, and the parameters whose gradients its backward pass completes.

    Attributes:
        size: bytes of the parameters.
        params: their names in the graph.
        nodes: of the piece, last one first.
        param_ids: ``id`` of each parameter.
        opcount_increased_to_capture_external_output: by how many nodes it was extended, until one of them had
            a user outside.
        paramsize_before_opcount_increase: its bytes before that.
    """

    size: int = 0
    params: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    param_ids: list[int] = field(default_factory=list)
    opcount_increased_to_capture_external_output: int = 0
    paramsize_before_opcount_increase: int = 0


@dataclass(frozen=True)
class _Parameter:
    name: str
    tensor: torch.Tensor
    first_use: int


def assign_buckets(
    gm: GraphModule, inputs: Sequence[object], caps_bytes: Sequence[int], facts: ReducerFacts | None
) -> list[Bucket]:
    """Return the pieces of a graph of Dynamo's, in forward order.

    Args:
        inputs: what Dynamo hands to a backend: the parameters themselves are among them.
        caps_bytes: of the first bucket, and of all others.
        facts: the reducer, where one is at work; its caps hold, and its buckets where it has them.
    """
    # 1. The parameters of the graph, the last one used first, and the bucket of each.
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    parameters = sorted(_parameters(gm, inputs, place), key=lambda item: -item.first_use)
    if facts is not None:
        reduced = {id(tensor) for tensor in facts.parameters}
        parameters = [parameter for parameter in parameters if id(parameter.tensor) in reduced]
    number_of = _numbers(parameters, caps_bytes, facts)

    # 2. A bucket is full where backward has reached the earliest first use in it: there the graph is cut.
    starts: dict[int, int] = {}
    for parameter in parameters:
        number = number_of[id(parameter.tensor)]
        starts[number] = min(starts.get(number, parameter.first_use), parameter.first_use)
    cuts = sorted(set(starts.values()), reverse=True)

    # 3. Take the nodes from the end on; a piece that nothing outside reads takes more until something does.
    buckets, current = [], Bucket()
    for node in reversed(nodes):
        current.nodes.append(node)
        for parameter in parameters:
            if parameter.first_use == place[node]:
                current.size += parameter.tensor.nbytes
                current.params.append(parameter.name)
                current.param_ids.append(id(parameter.tensor))
        if not cuts or place[node] > cuts[0]:
            continue
        if _is_read_outside(current):
            while cuts and place[node] <= cuts[0]:
                cuts.pop(0)
            buckets.append(current)
            current = Bucket()
        else:
            if not current.opcount_increased_to_capture_external_output:
                current.paramsize_before_opcount_increase = current.size
            current.opcount_increased_to_capture_external_output += 1

    # 4. What is left at the front, where it has no parameter, joins the next piece.
    if current.nodes:
        if buckets and not current.params:
            buckets[-1].nodes += current.nodes
        else:
            buckets.append(current)
    return buckets[::-1] or [Bucket()]


def group_by_caps(
    sizes: Sequence[int], kinds: Sequence[object], caps_bytes: Sequence[int]
) -> list[list[int]]:
    """Return the buckets that DDP makes of gradients that get ready in this order, by position.

    Each kind (data type and device) fills its own buckets, and has its own place in the list of caps. Buckets
    are ordered by their first gradient.
    """
    open_buckets: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    turn: dict[object, int] = {}
    done: list[list[int]] = []
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        open_buckets.setdefault(kind, []).append(position)
        filled[kind] = filled.get(kind, 0) + size
        cap = caps_bytes[min(turn.get(kind, 0), len(caps_bytes) - 1)]
        if filled[kind] >= cap:
            done.append(open_buckets.pop(kind))
            filled[kind] = 0
            turn[kind] = turn.get(kind, 0) + 1
    return sorted([*done, *open_buckets.values()])


def _numbers(
    used: Sequence[_Parameter], caps_bytes: Sequence[int], facts: ReducerFacts | None
) -> dict[int, int]:
    """The bucket of each parameter of the graph, by ``id``."""
    if facts is not None and facts.rebuilt is not None:
        tensors: Sequence[torch.Tensor] = facts.parameters
        groups: Sequence[Sequence[int]] = facts.rebuilt
    else:
        tensors = [parameter.tensor for parameter in used]
        if facts is not None:
            tensors, caps_bytes = _expected_order(tensors, facts.parameters), facts.caps_bytes
        kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
        groups = group_by_caps([tensor.nbytes for tensor in tensors], kinds, caps_bytes)
    return {id(tensors[index]): number for number, group in enumerate(groups) for index in group}


def _expected_order(
    used: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """All parameters of the module as they will get ready: those of this graph as it says, among the others
    in the reversed order of the module.
    """
    here, order = {id(tensor) for tensor in used}, iter(used)
    return [next(order) if id(tensor) in here else tensor for tensor in reversed(parameters)]


def _parameters(gm: GraphModule, inputs: Sequence[object], place: dict[Node, int]) -> list[_Parameter]:
    """Each parameter that gets a gradient, once, with the first node that uses it."""
    by_id: dict[int, _Parameter] = {}

    def add(name: str, value: object, number: int) -> None:
        if not isinstance(value, torch.nn.Parameter) or not value.requires_grad or is_ignored(value):
            return
        earlier = by_id.get(id(value))
        if earlier is None or number < earlier.first_use:
            by_id[id(value)] = _Parameter(name, value, number)

    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [*inputs, *(metadata(node) for node in placeholders[len(inputs) :])]
    for node, value in zip(placeholders, values, strict=False):
        if isinstance(value, torch.nn.Parameter) and node.users:
            add(str(node.target), value, _first_use(node, set(placeholders), place))
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.users:
            add(str(node.target), _attribute(gm, str(node.target)), _first_use(node, {node}, place))
        elif node.op == "call_module":
            for name, parameter in gm.get_submodule(str(node.target)).named_parameters():
                add(f"{node.target}_{name}", parameter, place[node])
    return list(by_id.values())


def _first_use(node: Node, sources: set[Node], place: dict[Node, int]) -> int:
    """Of a parameter. A node that reads parameters only (a transposed weight) counts where it is used
    first.
    """
    uses = []
    for user in node.users:
        if user.op != "output" and user.users and all(operand in sources for operand in user.all_input_nodes):
            uses.append(min(place[after] for after in user.users))
        uses.append(place[user])
    return min(uses)


def _attribute(gm: GraphModule, target: str) -> object:
    value: object = gm
    for atom in target.split("."):
        value = getattr(value, atom, None)
    return value


def _is_read_outside(bucket: Bucket) -> bool:
    inside = set(bucket.nodes)
    return any(user not in inside for node in bucket.nodes for user in node.users)
