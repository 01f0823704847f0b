"""Where a backward graph is cut: after the last gradient of each bucket.

node     mm  mm  sum  relu' mm  mm  sum  relu' mm  sum
gradient w3      b3         w2      b2         w1  b1
bucket   0       0          0       1          1   1
piece    |------- 0 -------->|------------ 1 ---->|
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from partita.errors import OrderConflict
from partita.splitter import Split, split

__all__ = ["BackwardGraph", "cut_backward"]


@dataclass(frozen=True)
class BackwardGraph:
    """A backward graph from AOTAutograd: inputs to a tuple with a gradient, or None, for each input of the
    forward graph.
    """

    gm: GraphModule

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Nodes, None, or numbers."""
        (values,) = self.gm.graph.output_node().args
        return tuple(values)  # type: ignore[arg-type]

    def in_order(self, positions: Mapping[int, Hashable]) -> list[int]:
        """Return those of the ``positions`` whose output is a node, in the order of their computation."""
        place = {node: number for number, node in enumerate(self.gm.graph.nodes)}
        outputs = self.outputs
        computed = [position for position in positions if isinstance(outputs[position], Node)]
        return sorted(computed, key=lambda position: place[outputs[position]])


def cut_backward(graph: BackwardGraph, buckets: Mapping[int, Hashable]) -> Split | None:
    """Cut after the last gradient of each bucket.

    What is only needed later is moved there (an activation that is computed again, a transposed weight), so
    that the first buckets are ready early and little crosses the cuts. An operator with several results stays
    together with the nodes that take them apart: what crosses a cut is a tensor.

    Args:
        buckets: for output positions, the bucket of that gradient.

    Returns:
        The cut graph; None where there is nothing to cut.
    """
    # 1. When is the last gradient of each bucket there?
    nodes = list(graph.gm.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    outputs = graph.outputs
    ready: dict[Hashable, int] = {}
    for position in graph.in_order(buckets):
        computed = place[_maker(outputs[position])]
        ready[buckets[position]] = max(computed, ready.get(buckets[position], 0))

    # 2. There the graph is cut, but not behind its last node.
    work = [
        number for number, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr", "output")
    ]
    cuts = sorted({number for number in ready.values() if work and work[0] <= number < work[-1]})
    if not cuts:
        return None

    # 3. Each node goes into the first piece that needs it, where the order of effects allows that.
    in_order = {nodes[number]: bisect_left(cuts, place[_maker(nodes[number])]) for number in work}
    try:
        return split(graph.gm, _sunk(nodes, in_order), tuple_return=True)
    except OrderConflict:
        return split(graph.gm, in_order, tuple_return=True)


def _sunk(nodes: list[Node], piece_of: dict[Node, int]) -> dict[Node, int]:
    """Each node in the first piece that needs it. What nobody needs has an effect, and stays."""
    sunk = dict(piece_of)
    for node in reversed(nodes):
        if node not in sunk:
            continue
        users = [user for user in node.users if user in sunk]
        if users and len(users) == len(node.users):
            sunk[node] = max(sunk[node], min(sunk[user] for user in users))
    return {node: sunk[_maker(node)] for node in sunk}


def _maker(node: Node) -> Node:
    """The node itself; for one of several results, the operator that they come from."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node
