"""One argument for each use of a value whose gradients other stages add to.

Autograd adds the gradients of the uses to what the later stages have sent, one by one, as it does uncut; a
compiled graph would add them up first. What returns its operand as it is (``x.float()`` of float32) is no
node of autograd, and what uses the result uses the operand.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node, map_arg

from partita.graph.conversions import returns_its_operand

__all__ = ["repeat_inputs", "repeat_what_changes_nothing", "replace_each", "times_in"]


def repeat_what_changes_nothing(graph: Graph, shared: Collection[str]) -> None:
    """Let each use of a shared value through a node that returns it as it is go through one of its own, in
    place.
    """
    same: set[Node] = set()
    conversions: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") and str(node.target) in shared:
            same.add(node)
        elif returns_its_operand(node) and node.all_input_nodes[0] in same:
            same.add(node)
            conversions.append(node)
    for node in reversed(conversions):  # the last first: what one goes through is repeated after it
        for user in sorted(user for user in node.users if user.op != "output"):
            with graph.inserting_before(user):
                copies = [graph.node_copy(node) for _ in range(times_in(user, node))]
            replace_each(user, node, copies)
        if not node.users:
            graph.erase_node(node)


def repeat_inputs(graph: Graph, start: Node, before: int, shared: Collection[str]) -> tuple[int, ...]:
    """Give each use of a shared input an argument of its own, in place; see `StatelessGraph`.

    Args:
        start: the first input.
        before: how many arguments stand before it.
    """
    places: list[int] = []
    for place, node in enumerate(graph.find_nodes(op="placeholder")[before:]):
        uses = sorted(user for user in node.users if user.op != "output")
        if str(node.target) not in shared or sum(times_in(user, node) for user in uses) < 2:
            continue
        for user in uses:
            arguments = []
            for _ in range(times_in(user, node)):
                with graph.inserting_before(start):
                    arguments.append(graph.placeholder(f"partita_use_{len(places)}"))
                arguments[-1].meta = dict(node.meta)
                places.append(place)
            replace_each(user, node, arguments)
    return tuple(places)


def times_in(user: Node, node: Node) -> int:
    """How many times a node is an operand of another one (``h * h``)."""
    operands: list[Node] = []
    map_arg((user.args, user.kwargs), operands.append)
    return sum(operand is node for operand in operands)


def replace_each(user: Node, node: Node, arguments: list[Node]) -> None:
    """Give a node an argument for each time that another one is its operand: the last argument first, for
    autograd takes the gradients of one node's operands in their order, and those of arguments last first.
    """

    def one(operand: Node) -> Node:
        return arguments.pop() if operand is node else operand

    user.args, user.kwargs = map_arg(user.args, one), map_arg(user.kwargs, one)
