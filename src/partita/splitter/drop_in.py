"""``split_module`` and ``Partition`` as in ``torch.fx.passes.split_module``, on partita's splitter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.modules.contents import named_state
from partita.errors import GraphError
from partita.splitter.building.collection import collection_paused
from partita.splitter.building.cut import CutOptions
from partita.splitter.building.rebinding import make_rebinding_explicit
from partita.splitter.decisions.analysis import analyse_split
from partita.splitter.result import Split
from partita.splitter.split import SplitBuilder

__all__ = ["Partition", "partitions_of", "split_module"]


@collection_paused()
def split_module(
    m: GraphModule,
    root_m: nn.Module | None,  # noqa: ARG001  (torch has it)
    split_callback: Callable[[Node], object],
    qualname_map: MutableMapping[str, str] | None = None,
    keep_original_order: bool = False,
    keep_original_node_name: bool = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | int | None = None,
    tuple_return: bool = False,
) -> GraphModule:
    """Cut a graph module into submodules, like torch's function of that name.

    Parameters and buffers that the graph reads stay on the result and are passed in; modules that it calls
    move to the pieces that call them (``layers.0`` is ``layers_0`` there). `partita.split` moves parameters
    too, and reports what it decided.

    It differs from torch's function on purpose: pieces are ordered by everything that can be observed, not by
    data alone, and as near to the original order as is legal; grad mode and autocast regions are kept;
    metadata, the training flag and the signature of exported programs are kept; the callback is called once
    for each node.

    Args:
        m: is not changed.
        root_m: unused, as in torch.
        split_callback: returns the key of a node's piece; keys are compared as text. Called once for each
            node, in order, but for placeholders, attributes and the output.
        qualname_map: receives, for the name of each called module, parameter and buffer in the result, its
            name in ``m`` (torch enters the modules only).
        keep_original_order: the result reads each attribute just before the piece that needs it. In either
            case the pieces have the order of their first nodes, wherever that is legal.
        keep_original_node_name: nodes in the pieces are called as in ``m``; else they are named after what
            they do.
        keep_original_input_name: inputs of the pieces are called as in ``m``; else ``arg_0``, ``arg_1``, ...
        partition_affix: pieces are called ``submod_<affix>_<id>`` and not ``submod_<id>``.
        tuple_return: a piece with a single output returns a 1-tuple. A value that is itself a tuple is then
            nested in it.

    Returns:
        A module that is called like ``m``. ``meta["partition_names"]`` is the set of the pieces' names. For
        none, one or more outputs a piece returns ``()``, the bare value, or a tuple.

    Raises:
        OrderConflict: the pieces need each other in a cycle; the message shows the chain of nodes.
        RegionError: an autocast region that is never left.
        GraphError: a malformed graph, or an attribute that ``m`` does not have.

    >>> import torch
    >>> gm = torch.fx.symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    >>> cut = split_module(gm, None, lambda node: 0 if node.name == "sin" else 1)
    >>> [name for name, _ in cut.named_children()]
    ['submod_0', 'submod_1']
    """
    if not isinstance(m, GraphModule):
        raise GraphError(
            f"split_module takes a torch.fx.GraphModule, got {type(m).__name__}: capture the model first, "
            "for example with torch.fx.symbolic_trace(model)"
        )
    prefix = "" if partition_affix is None else f"{partition_affix}_"
    m, assignment = make_rebinding_explicit(m, lambda node: prefix + str(split_callback(node)))
    analysis = analyse_split(m, assignment, repair=False, doubt_inputs=True)
    options = CutOptions(
        keep_input_names=keep_original_input_name,
        keep_node_names=keep_original_node_name,
        tuple_return=tuple_return,
        flat_targets=True,
        outputs_by_use=True,
        attributes_first=not keep_original_order,
    )
    builder = SplitBuilder(m, analysis, "root", options)
    cut = builder.build([f"submod_{key}".replace(".", "_") for key in analysis.keys])
    cut.module.meta["partition_names"] = {piece.name for piece in cut.pieces}
    if qualname_map is not None:
        qualname_map.update(_original_names(cut.module, builder.original_names))
    return cut.module


def _original_names(module: GraphModule, modules: Mapping[str, str]) -> dict[str, str]:
    """The original name of every called module, parameter and buffer, by its name in ``module``.

    Args:
        modules: the same for the called modules only.
    """
    names = dict(modules)
    for name, _ in named_state(module):
        atoms = name.split(".")
        prefixes = [".".join(atoms[:length]) for length in range(len(atoms), 0, -1)]
        owner = next((prefix for prefix in prefixes if prefix in modules), None)
        names[name] = name if owner is None else modules[owner] + name.removeprefix(owner)
    return names


@dataclass
class Partition:
    """A piece in the form of torch's ``Partition``.

    Attributes:
        name: the key of the piece, as text.
        submod_name: the name of the piece in the stitched module.
        node_names: of the original nodes, in order.
        inputs, outputs: names of the values that cross, as the keys of a dict.
        dependencies, dependents: names of the partitions that it takes values from and gives values to.
        graph: of the piece.
        environment: from the nodes of the original graph to those of the piece.
        targets: what the piece holds, by its name there.
    """

    name: str
    submod_name: str = ""
    node_names: list[str] = field(default_factory=list)
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    dependencies: dict[str, None] = field(default_factory=dict)
    dependents: dict[str, None] = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)
    environment: dict[Node, Node] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.submod_name = self.submod_name or f"submod_{self.name}"

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{key}={list(getattr(self, key))}"
            for key in ("node_names", "inputs", "outputs", "dependencies", "dependents")
        )
        return f"Partition({self.name!r}, {parts})"


def partitions_of(cut: Split, gm: GraphModule) -> dict[str, Partition]:
    """Return the pieces of ``cut``, a split of ``gm``, as partitions by name, in the order they run in."""
    originals = {node.name: node for node in gm.graph.nodes}
    names = {piece.name: piece.name.removeprefix("submod_") for piece in cut.pieces}
    partitions = {}
    for piece in cut.pieces:
        graph = piece.module.graph
        partitions[names[piece.name]] = Partition(
            names[piece.name],
            piece.name,
            list(piece.node_names),
            dict.fromkeys(piece.inputs),
            dict.fromkeys(piece.outputs),
            graph=graph,
            environment={
                originals[node.name]: node
                for node in graph.nodes
                if node.op != "output" and node.name in originals
            },
            targets=dict(piece.module.named_children()),
        )
    for edge in cut.edges:
        if edge.producer is not None and edge.consumer is not None:
            partitions[names[edge.consumer]].dependencies[names[edge.producer]] = None
            partitions[names[edge.producer]].dependents[names[edge.consumer]] = None
    return partitions
