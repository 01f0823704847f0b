"""A backward graph for the case that some of the forward graph's outputs have no gradient.

AOTAutograd's graph takes a gradient for each of them; zeros in place of one would give zeros to parameters
that autograd leaves without a gradient (an optimizer with weight decay changes those, and not these). A
backward graph is linear in the gradients that it is given, so what depends on missing ones only is missing::

    gradient of y0 ──> mm ──┐                                  y1 has none:
    gradient of y1 ──> mm ──┴ add ──> w0                       w0: mm of y0 alone
                   └─> sum ─────────> w1                       w1: none
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from partita.graph.effects import analyse
from partita.pipelining.compiled.backward_graph import copied, gradients_of

__all__ = ["without_gradients"]

_SUM = torch.ops.aten.add.Tensor


def without_gradients(gm: GraphModule, missing: Collection[str], arriving: Collection[str]) -> GraphModule:
    """Return a copy of a backward graph without some of its inputs. One that it can't do without (a
    concatenation needs zeros) stays, and must be given zeros.

    Args:
        missing: names of the inputs without a value.
        arriving: names of the other inputs that are gradients.
    """
    gm = copied(gm)
    effects = analyse(gm, distinct_inputs=True)
    observable = {effects.nodes[position] for position, it in effects.by_position.items() if it.observable}
    absent: set[Node] = set()
    present: set[Node] = set()
    for node in effects.nodes:
        operands = node.all_input_nodes
        if node.op == "placeholder":
            if node.name in missing:
                absent.add(node)
            elif node.name in arriving:
                present.add(node)
        elif node.op == "output" or node in observable:
            continue
        elif absent.isdisjoint(operands):
            if not present.isdisjoint(operands):
                present.add(node)
        elif present.isdisjoint(operands):
            absent.add(node)
        else:
            present.add(node)
            _leave_out(node, absent)
    output = gm.graph.output_node()
    values = tuple(None if value in absent else value for value in gradients_of(gm))
    output.args = (values,)
    gm.graph.eliminate_dead_code(lambda node: node in observable or node.op in ("placeholder", "output"))
    for node in gm.graph.find_nodes(op="placeholder"):
        if node in absent and not node.users:
            gm.graph.erase_node(node)
    return gm


def _leave_out(node: Node, absent: Collection[Node]) -> None:
    """Let a sum of a value and a missing one be that value, where nothing else changes."""
    if node.target is not _SUM or node.kwargs.get("alpha", 1) != 1:
        return
    present = [operand for operand in node.args[:2] if isinstance(operand, Node) and operand not in absent]
    if len(present) != 1:
        return
    before, after = node.meta["val"], present[0].meta["val"]
    if before.shape == after.shape and before.dtype == after.dtype:
        node.replace_all_uses_with(present[0])
