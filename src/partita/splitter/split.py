"""``partita.split``: one graph in, pieces and a stitched module out, observably equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from partita._torch.graph_module.lazy_module import lazy_module, mark_impure
from partita._torch.modules.contents import carry_hooks
from partita.errors import GraphError, SplitError
from partita.garbage import no_garbage_collection
from partita.graph.attributes import attribute, lookup
from partita.graph.casts import outermost_autocast
from partita.graph.effects import metadata
from partita.graph.liveness import tensor_bytes
from partita.splitter.building.collection import collection_paused
from partita.splitter.building.cut import CutOptions, cut_piece
from partita.splitter.building.install import attributes_of, install, renamed
from partita.splitter.building.rebinding import make_rebinding_explicit
from partita.splitter.building.stitch import SharedCache, stitch
from partita.splitter.decisions.analysis import Analysis, analyse_split
from partita.splitter.decisions.assignment import Assignment
from partita.splitter.decisions.flow import SharedState, piece_flows, place_attributes
from partita.splitter.result import Edge, Piece, Split, SplitReport

__all__ = ["SplitBuilder", "split"]


@collection_paused()
def split(
    gm: GraphModule,
    assignment: Assignment,
    *,
    on_conflict: Literal["error", "repair"] = "error",
    shared: SharedState = "replicate",
    tuple_return: bool = False,
) -> Split:
    """Cut a graph into pieces that together do exactly what the whole did.

    Pieces are ordered by data **and** by everything else that can be observed: writes to shared memory,
    random numbers, side effects. Of the legal orders the one nearest to the original is taken. Each node runs
    under the grad mode, inference mode and autocast that it has in ``gm``, and these end as in ``gm``.
    ``gm`` is not changed; the pieces hold its parameters (the same tensors, original names).

    Args:
        gm: from ``torch.fx.symbolic_trace``, ``torch.export`` (``ep.module()``), dynamo, AOTAutograd, or made
            by hand.
        assignment: a function from node to the key of its piece, or a mapping from node (or node name) to
            key. A function is called once a node, in order, not for placeholders, attributes and the output.
            Pieces are named ``submod_<key>``.
        on_conflict: what to do where the assigned pieces need each other in a cycle. ``"error"`` raises;
            ``"repair"`` divides pieces where that is enough, and says so in the report.
        shared: what happens to a parameter or buffer that several pieces use (see `SharedState`).
        tuple_return: a piece with one output returns a 1-tuple and not the bare value.

    Returns:
        The pieces, the stitched module, the values that cross, and a report. Results are bit for bit those of
        ``gm``; only where ``report.reordered`` is true may a gradient that sums three or more uses differ in
        its last bits.

    Raises:
        AssignmentError: a node without a key, an unknown name, a key that can't be hashed.
        OrderConflict: pieces that can't be ordered; the message shows the chain of nodes.
        GraphError: a malformed graph, or an attribute that the module does not have.
        RegionError: an autocast region that is never left.

    >>> import torch, partita
    >>> gm = torch.fx.symbolic_trace(lambda x: torch.cos(torch.sin(x)) + 1)
    >>> cut = partita.split(gm, {"sin": 0, "cos": 1, "add": 1})
    >>> [(piece.name, piece.inputs, piece.outputs) for piece in cut.pieces]
    [('submod_0', ('x',), ('sin',)), ('submod_1', ('sin',), ('add',))]
    >>> partita.verify(cut, gm, (torch.randn(3),)).ok
    True
    """
    if not isinstance(gm, GraphModule):
        raise GraphError(
            f"split takes a torch.fx.GraphModule, got {type(gm).__name__}: capture the model first, for "
            "example with torch.export.export(model, args).module() or torch.fx.symbolic_trace(model)"
        )
    if on_conflict not in ("error", "repair"):
        raise SplitError(f"on_conflict is 'error' or 'repair', got {on_conflict!r}")
    if shared not in ("replicate", "transmit", "root"):
        raise SplitError(f"shared is 'replicate', 'transmit' or 'root', got {shared!r}")
    gm, assignment = make_rebinding_explicit(gm, assignment)
    analysis = analyse_split(gm, assignment, repair=on_conflict == "repair", doubt_inputs=True)
    builder = SplitBuilder(gm, analysis, shared, CutOptions(tuple_return=tuple_return))
    return builder.build([f"submod_{_name_of(key)}" for key in analysis.keys])


class SplitBuilder:
    """Builds what an `Analysis` decided, for `split` and the drop-in ``split_module``.

    Attributes:
        original_names: from the name of a called module in the stitched module to its name in ``gm``; filled
            while building.
        part_of: for each position its part; -1 where it is outside of all.
        copied: for each attribute that pieces hold for themselves, those parts.
        scopes: the autocast caches that several parts share.
        roots: positions of the attributes that the stitched module itself needs.
    """

    def __init__(self, gm: GraphModule, analysis: Analysis, shared: SharedState, options: CutOptions) -> None:
        self.gm = gm
        self.analysis = analysis
        self.options = options
        self.nodes, self.index = analysis.effects.nodes, analysis.effects.index
        graphs = {
            position
            for position, node in enumerate(self.nodes)
            if node.op == "get_attr" and attribute(gm, node).kind == "module"
        }
        self.original_names: dict[str, str] = {}
        self.part_of, self.copied = place_attributes(
            self.nodes, self.index, analysis.parts.part_of, graphs, shared
        )
        self.flows = piece_flows(
            self.nodes,
            self.index,
            self.part_of,
            self.copied,
            len(analysis.parts.origin),
            analysis.ambients,
            outputs_by_use=options.outputs_by_use,
        )
        self.scopes = self._cache_scopes()
        self.roots = [
            position
            for position, node in enumerate(self.nodes)
            if node.op == "get_attr" and self.part_of[position] < 0 and self._outside(position)
        ]

    @no_garbage_collection()
    def build(self, names: Sequence[str]) -> Split:
        """Build the pieces and the stitched module; ``names`` are those of the assigned pieces."""
        part_names = self._part_names(names)
        pieces = tuple(self._piece(part, name) for part, name in enumerate(part_names))
        module = self._stitched(pieces)
        shared = {
            str(self.nodes[position].target): tuple(part_names[part] for part in parts)
            for position, parts in self.copied.items()
            if len(parts) > 1 and isinstance(lookup(self.gm, self.nodes[position]), torch.Tensor)
        }
        report = SplitReport(self.analysis.parts.conflicts, self.analysis.reordered, shared, self._notes())
        return Split(module, pieces, self._edges(part_names), report)

    def _notes(self) -> tuple[str, ...]:
        """The conditions under which the order is right, for the report."""
        guards, notes = self.analysis.guards, list[str]()
        if guards.distinct is not None:
            written = ", ".join(repr(self.nodes[position].name) for position in guards.distinct.written)
            notes.append(
                f"the graph writes the input {written}; the order of the pieces is right only where no other "
                "input shares its memory, and each run checks that"
            )
        if guards.foreign:
            notes.append(
                "the graph writes an input or a tensor of the model; the order of the pieces is right only "
                "where no input is one of the model's own tensors, and each run checks that"
            )
        return tuple(notes)

    def _part_names(self, names: Sequence[str]) -> list[str]:
        """Names that are free on the stitched module; the second part of a piece is called ``…_part1``."""
        taken = {str(self.nodes[position].target).partition(".")[0] for position in self.roots}
        part_names = []
        for origin, number in zip(self.analysis.parts.origin, self.analysis.parts.number, strict=True):
            name = names[origin] + (f"_part{number}" if number else "")
            while name in taken:
                name += "_"
            taken.add(name)
            part_names.append(name)
        return part_names

    def _piece(self, part: int, name: str) -> Piece:
        # The graph.
        flow = self.flows[part]
        borders = self.analysis.cache_borders if self.scopes else frozenset()
        graph, names = cut_piece(
            self.nodes, flow, self.analysis.ambients, self.options, self.gm.graph, borders
        )
        module = lazy_module(graph, name, training=self.gm.training)
        # What it refers to, under the original names.
        attributes = attributes_of(self.gm, (self.nodes[position] for position in (*flow.local, *flow.body)))
        called = {
            str(self.nodes[position].target)
            for position in flow.body
            if self.nodes[position].op == "call_module"
        }
        self.original_names.update((f"{name}.{names[target]}", target) for target in sorted(called))
        install(module, renamed(attributes, names) if self.options.flat_targets else attributes)
        effects = self.analysis.effects.by_position
        if any(position in effects and effects[position].observable for position in flow.body):
            # torch's dead-code elimination keeps a call_module node only where its module says so
            mark_impure(module)
        key = self.analysis.keys[self.analysis.parts.origin[part]]
        return Piece(
            name=name,
            key=key,
            module=module,
            inputs=tuple(self.nodes[position].name for position in flow.inputs),
            outputs=tuple(self.nodes[position].name for position in flow.outputs),
            node_names=tuple(self.nodes[position].name for position in flow.body),
        )

    def _stitched(self, pieces: Sequence[Piece]) -> GraphModule:
        final = self.analysis.final
        graph = stitch(
            self.gm.graph,
            self.nodes,
            self.flows,
            [piece.name for piece in pieces],
            roots=self.roots,
            final=final,
            scopes=self.scopes,
            tuple_return=self.options.tuple_return,
            attributes_first=self.options.attributes_first,
            guards=self.analysis.guards,
        )
        module = lazy_module(graph, type(self.gm).__name__, training=self.gm.training)
        install(module, attributes_of(self.gm, (self.nodes[position] for position in self.roots)))
        for piece in pieces:
            module.add_module(piece.name, piece.module)
        module.meta = dict(self.gm.meta)
        carry_hooks(self.gm, module)
        return module

    def _outside(self, position: int) -> bool:
        """Whether the root itself needs an attribute: to pass it to a piece, or to return it."""
        node = self.nodes[position]
        return position not in self.copied or any(user.op == "output" for user in node.users)

    def _cache_scopes(self) -> list[SharedCache]:
        """The outermost autocast regions that several parts share."""
        if self.analysis.ambients is None:
            return []
        spans: dict[Node, tuple[int, int]] = {}
        for part, flow in enumerate(self.flows):
            for position in flow.body:
                outermost = outermost_autocast(self.analysis.ambients[position])
                if outermost is not None:
                    first, last = spans.get(outermost, (part, part))
                    spans[outermost] = (min(first, part), max(last, part))
        return [SharedCache(first, last) for first, last in spans.values() if first != last]

    def _edges(self, names: Sequence[str]) -> tuple[Edge, ...]:
        edges = []
        for part, flow in enumerate(self.flows):
            for position in flow.inputs:
                origin = self.part_of[position]
                edges.append(_edge(self.nodes[position], names[origin] if origin >= 0 else None, names[part]))
        for operand in self.nodes[-1].all_input_nodes:
            origin = self.part_of[self.index[operand]]
            if origin >= 0:
                edges.append(_edge(operand, names[origin], None))
        return tuple(edges)


def _edge(node: Node, producer: str | None, consumer: str | None) -> Edge:
    value = metadata(node)
    if not isinstance(value, torch.Tensor):
        return Edge(producer, consumer, node.name)
    return Edge(producer, consumer, node.name, tuple(value.shape), value.dtype, tensor_bytes(value))


def _name_of(key: Any) -> str:
    """A key as text that can be part of an identifier."""
    text = str(key)
    return "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in text) or "_"
