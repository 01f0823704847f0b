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

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def assign_buckets(
    gm: GraphModule, inputs: Sequence[object], caps_bytes: Sequence[int], facts: ReducerFacts | None
) -> list[Bucket]:
    """The pieces of a graph of Dynamo's, in forward order.

    Args:
        inputs: what Dynamo hands to a backend: the parameters themselves are among them.
        caps_bytes: of the first bucket, and of all others.
        facts: the reducer, where one is at work; its caps hold, and its buckets where it has them.
    """
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    found = sorted(_parameters(gm, inputs, place), key=lambda item: -item.first_use)
    if facts is not None:
        reduced = {id(tensor) for tensor in facts.parameters}
        found = [parameter for parameter in found if id(parameter.tensor) in reduced]
    number_of = _numbers(found, caps_bytes, facts)
    starts: dict[int, int] = {}
    for parameter in found:
        number = number_of[id(parameter.tensor)]
        starts[number] = min(starts.get(number, parameter.first_use), parameter.first_use)
    cuts = sorted(set(starts.values()), reverse=True)
    buckets, current = [], Bucket()
    wanted = list(cuts)
    for node in reversed(nodes):
        current.nodes.append(node)
        for parameter in found:
            if parameter.first_use == place[node]:
                current.size += parameter.size_bytes
                current.params.append(parameter.name)
                current.param_ids.append(id(parameter.tensor))
        if not wanted or place[node] > wanted[0]:
            continue
        if _seen_outside(current):
            while wanted and place[node] <= wanted[0]:
                wanted.pop(0)
            buckets.append(current)
            current = Bucket()
        else:
            if not current.opcount_increased_to_capture_external_output:
                current.paramsize_before_opcount_increase = current.size
            current.opcount_increased_to_capture_external_output += 1
    if current.nodes:
        if buckets and not current.params:
            buckets[-1].nodes += current.nodes
        else:
            buckets.append(current)
    return buckets[::-1] or [Bucket()]


def group_by_caps(
    sizes: Sequence[int], kinds: Sequence[object], caps_bytes: Sequence[int]
) -> list[list[int]]:
    """The buckets that DDP makes of gradients that get ready in this order, by position.

    Each kind (data type and device) fills its own buckets, and has its own place in the list of caps. Buckets
    are ordered by their first gradient.
    """
    open_buckets: dict[object, list[int]] = {}
    held: dict[object, int] = {}
    turn: dict[object, int] = {}
    done: list[list[int]] = []
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        open_buckets.setdefault(kind, []).append(position)
        held[kind] = held.get(kind, 0) + size
        cap = caps_bytes[min(turn.get(kind, 0), len(caps_bytes) - 1)]
        if held[kind] >= cap:
            done.append(open_buckets.pop(kind))
            held[kind] = 0
            turn[kind] = turn.get(kind, 0) + 1
    return sorted([*done, *open_buckets.values()])


def _numbers(
    found: Sequence[_Parameter], caps_bytes: Sequence[int], facts: ReducerFacts | None
) -> dict[int, int]:
    """The bucket of each parameter of the graph, by ``id``."""
    if facts is None:
        tensors: list[torch.Tensor] = [parameter.tensor for parameter in found]
        groups = group_by_caps(_sizes(tensors), _kinds(tensors), caps_bytes)
    elif facts.rebuilt is not None:
        tensors = list(facts.parameters)
        groups = [list(bucket) for bucket in facts.rebuilt]
    else:
        tensors = _expected_order(found, facts.parameters)
        groups = group_by_caps(_sizes(tensors), _kinds(tensors), facts.caps_bytes)
    return {id(tensors[index]): number for number, group in enumerate(groups) for index in group}


def _expected_order(found: Sequence[_Parameter], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All parameters of the module as they will get ready: those of this graph as it says, among the others
    in the reversed order of the module.
    """
    here = {id(parameter.tensor) for parameter in found}
    order = iter([parameter.tensor for parameter in found])
    return [next(order) if id(tensor) in here else tensor for tensor in reversed(parameters)]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def _kinds(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [(tensor.dtype, tensor.device) for tensor in tensors]


def _parameters(gm: GraphModule, inputs: Sequence[object], place: dict[Node, int]) -> list[_Parameter]:
    """Each parameter that gets a gradient, once, with the first node that uses it."""
    found: dict[int, _Parameter] = {}

    def add(name: str, value: object, number: int) -> None:
        if not isinstance(value, torch.nn.Parameter) or not value.requires_grad or is_ignored(value):
            return
        known = found.get(id(value))
        if known is None or number < known.first_use:
            found[id(value)] = _Parameter(name, value, number)

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
    return list(found.values())


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


def _seen_outside(bucket: Bucket) -> bool:
    inside = set(bucket.nodes)
    return any(user not in inside for node in bucket.nodes for user in node.users)
