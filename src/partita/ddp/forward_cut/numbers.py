"""Python floats that Dynamo takes to be dynamic, such as the rates of stochastic depth in equal blocks, and
what is computed of them: each piece has its own.

A graph is handed such a number as a tensor, reads it with ``item()`` and computes with it. AOTAutograd can't
compile a piece that returns a number, nor one that takes it as an input.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from partita._torch.compile.forward_pieces import is_of_dynamic_floats
from partita.graph.copies import copies_for, users_by_part
from partita.graph.effects import metadata

__all__ = ["repeat_numbers"]


def repeat_numbers(gm: GraphModule, number_of: dict[Node, int]) -> None:
    """Give each piece nodes of its own, in place, for the dynamic floats that it computes with.

    Args:
        number_of: the piece of each node that computes; it is changed, and the copies are added.
    """
    for node in reversed(list(gm.graph.nodes)):
        if node not in number_of or not is_of_dynamic_floats(metadata(node)):
            continue
        users = users_by_part(node, number_of.get)
        users.pop(number_of[node], None)
        number_of.update({copied: number for number, copied in copies_for(node, users).items()})
        if users and not node.users:
            gm.graph.erase_node(node)
            del number_of[node]
