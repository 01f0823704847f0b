"""The inputs and outputs of each piece, once it is known which node runs in which piece.

Terms:
    position: of a node in the original graph; it also stands for the node's value.
    root: the stitched module outside of all pieces, piece -1.
    attribute: a ``get_attr`` node: a parameter, a buffer or a nested graph. Where several pieces use one,
        `SharedState` says who has it.
    symbol: a symbolic size. A piece whose values have such a size needs its value too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from partita._torch.graph_module.nodes import free_symbols
from partita.graph.effects import metadata
from partita.graph.regions import Ambient

__all__ = ["PieceFlow", "SharedState", "piece_flows", "place_attributes"]

SharedState = Literal["replicate", "transmit", "root"]
"""What happens to a parameter or buffer that several pieces use.

``replicate``: each piece holds it (the same tensor object, so that a local run sums the gradients by itself).
``transmit``: the first piece that uses it holds it, and returns its value for the others. ``root``: the
stitched module holds it and passes it in, as torch's ``split_module`` does; under this policy parameters that
one piece uses stay with the root too.
"""


@dataclass
class PieceFlow:
    """The positions that make one piece.

    Attributes:
        body: its nodes, in order.
        inputs: in the order in which the piece first uses them, so that equal pieces have equal inputs.
        outputs: what other pieces, or the root, use.
        local: the attributes that the piece holds itself.
    """

    body: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)


def place_attributes(
    nodes: Sequence[Node],
    index: dict[Node, int],
    part_of: list[int],
    module_attributes: set[int],
    shared: SharedState,
) -> tuple[list[int], dict[int, list[int]]]:
    """Decide which pieces hold each attribute.

    Args:
        module_attributes: positions of the attributes that are graphs (bodies of higher-order operators):
            each piece that uses one holds it.

    Returns:
        ``part_of``, completed by the attributes that one piece holds for others; and the pieces that hold
        each of the other attributes. What is in neither stays with the root.
    """
    placed = list(part_of)
    copied: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        if node.op != "get_attr":
            continue
        is_graph = position in module_attributes
        if shared == "root" and not is_graph:
            continue
        users = sorted({part_of[index[user]] for user in node.users} - {-1})
        if not users:
            continue
        if shared == "transmit" and not is_graph and len(users) > 1:
            placed[position] = users[0]
        else:
            copied[position] = users
    return placed, copied


def piece_flows(
    nodes: Sequence[Node],
    index: dict[Node, int],
    part_of: list[int],
    copied: dict[int, list[int]],
    count: int,
    ambients: Sequence[Ambient] | None,
    *,
    outputs_by_use: bool = False,
) -> list[PieceFlow]:
    """Return the flow of every piece, in time linear in nodes and edges.

    Args:
        copied: for each attribute that pieces hold for themselves, those pieces.
        count: number of pieces.
        outputs_by_use: outputs in the order in which others first use them, as torch has them, and not in
            that of their nodes.
    """
    flows = [PieceFlow() for _ in range(count)]
    inputs: list[dict[int, None]] = [{} for _ in range(count)]
    outputs: list[dict[int, None]] = [{} for _ in range(count)]
    local: list[dict[int, None]] = [{} for _ in range(count)]
    symbols = _symbol_sources(nodes)

    def require(part: int, source: int) -> None:
        """Let piece ``part`` have the value of ``source``."""
        origin = part_of[source]
        if origin == part:
            return
        if part >= 0:
            if source in copied:
                local[part][source] = None
                return
            if source in inputs[part]:
                return
            inputs[part][source] = None
            for symbol in free_symbols(metadata(nodes[source])) if symbols else ():
                require_symbol(part, symbol)
        if origin >= 0:
            outputs[origin][source] = None

    def require_symbol(part: int, symbol: object) -> None:
        """Let piece ``part`` have the value of a symbol, if an earlier piece or the root computes it."""
        source = symbols.get(symbol)
        if source is not None and part_of[source] < part:
            require(part, source)

    for position, node in enumerate(nodes):
        part = part_of[position]
        if part >= 0:
            flows[part].body.append(position)
        elif node.op != "output":
            continue
        # A node needs its operands,
        for operand in node.all_input_nodes:
            require(part, index[operand])
        # those of the switches that its piece enters again,
        if ambients is not None and part >= 0:
            for switch in ambients[position].switches:
                for operand in switch.all_input_nodes:
                    require(part, index[operand])
        # and the sizes of its value.
        if symbols and part >= 0:
            for symbol in free_symbols(metadata(node)):
                require_symbol(part, symbol)
    for part, flow in enumerate(flows):
        flow.inputs = list(inputs[part])
        flow.outputs = list(outputs[part]) if outputs_by_use else sorted(outputs[part])
        flow.local = sorted(local[part])
    return flows


def _symbol_sources(nodes: Sequence[Node]) -> dict[object, int]:
    """For each symbol the first node whose value is exactly that symbol."""
    sources: dict[object, int] = {}
    for position, node in enumerate(nodes):
        value = node.meta and metadata(node)
        if isinstance(value, torch.SymInt):
            symbols = free_symbols(value)
            if len(symbols) == 1 and value.node.expr in symbols:
                sources.setdefault(symbols[0], position)
    return sources
