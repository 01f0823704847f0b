"""Runs the backward graph of a compiled stage: as a whole (B), or its halves (I, then W).

Each is compiled when it first runs, so that a schedule that does not split compiles B alone, and one that
does, I and W alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from partita._torch.autograd.compiled_node import asked, hide_missing, leave, site_of_node
from partita._torch.autograd.region_switches import autocast_off
from partita._torch.compile.aot import AotGraph, Boxed
from partita._torch.tensors.example_tensors import zeros_like_example
from partita._torch.tensors.storage import storage_key
from partita.pipelining.compiled.backward_cut import INPUTS, WEIGHTS, cut_backward
from partita.pipelining.compiled.backward_graph import gradients_of, leave_out_idle_seeds
from partita.pipelining.compiled.missing_gradients import without_gradients
from partita.runtime.rng import sites_from
from partita.splitter import Piece

__all__ = ["BackwardRunner"]

CompilePiece = Callable[[AotGraph], Boxed]


class BackwardRunner:
    """What AOTAutograd calls for the backward pass of one forward graph.

    Args:
        graph: the backward graph.
        compile_piece: compiles it, or a piece of it.
        fuses: see `cut_backward`.
    """

    def __init__(self, graph: AotGraph, compile_piece: CompilePiece, *, fuses: bool) -> None:
        self._graph = graph
        self._compile = compile_piece
        self._fuses = fuses
        self._draws = leave_out_idle_seeds(graph.gm)
        self._variants: dict[tuple[int, ...], _Variant] = {}

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        variant = self._variant(tuple([place for place, value in enumerate(values) if value is None]))
        if not self._draws:
            return variant.run(values, asked())
        with sites_from(site_of_node()):
            return variant.run(values, asked())

    def compile(
        self, early_inputs: Collection[int], missing: Sequence[bool], *, whole: bool, halves: bool
    ) -> None:
        """Compile what a schedule will ask for.

        Args:
            early_inputs: positions of the forward graph's inputs whose gradients I computes.
            missing: for each output that depends on what is trained whether it has no gradient. Where these
                are not the gradients that the graph takes, nothing is compiled.
            whole: B.
            halves: I and W; B where I has nothing to compute.
        """
        names = [node.name for node in self._graph.gm.graph.find_nodes(op="placeholder")]
        gradients = [place for place, name in enumerate(names) if name.startswith("tangents")]
        if len(gradients) != len(missing):
            return
        variant = self._variant(tuple(compress(gradients, missing)))
        tensors = self._graph.forward_tensors
        early = frozenset(edge for edge, place in enumerate(tensors) if place in early_inputs)
        if whole or not early:
            variant.whole()
        if halves and early:
            variant.halves(early)

    def _variant(self, missing: tuple[int, ...]) -> _Variant:
        variant = self._variants.get(missing)
        if variant is None:
            variant = self._variants[missing] = self._new_variant(missing)
        return variant

    def _new_variant(self, missing: tuple[int, ...]) -> _Variant:
        graph = self._graph
        names = [node.name for node in graph.gm.graph.find_nodes(op="placeholder")]
        if missing:
            gradients = [name for name in names if name.startswith("tangents")]
            absent = {names[place] for place in missing}
            gm = without_gradients(graph.gm, absent, [name for name in gradients if name not in absent])
            graph = graph.piece(gm)
        used = {node.name for node in graph.gm.graph.find_nodes(op="placeholder")}
        places = [place for place, name in enumerate(names) if name in used]
        return _Variant(graph, self._compile, places, missing=bool(missing), fuses=self._fuses)


@dataclass(frozen=True)
class _Halves:
    """A backward graph in two, for one set of gradients that I computes.

    Attributes:
        first: runs I; None where it is empty.
        takes: names of its inputs.
        makes: names of what it returns.
        second: runs W; None where it is empty.
        keeps: names of what W takes, and of gradients that are there when I has run.
        now: positions and names of the wanted gradients.
        later: edges and names of the others.
    """

    first: Boxed | None
    takes: tuple[str, ...]
    makes: tuple[str, ...]
    second: Boxed | None
    second_takes: tuple[str, ...]
    second_makes: tuple[str, ...]
    keeps: tuple[str, ...]
    now: tuple[tuple[int, str], ...]
    later: tuple[tuple[int, str], ...]


class _Variant:
    """A backward graph for one set of outputs that have a gradient.

    Args:
        places: of its inputs among those that AOTAutograd hands over.
        missing: whether any of these may have no value.
    """

    def __init__(
        self,
        graph: AotGraph,
        compile_piece: CompilePiece,
        places: Sequence[int],
        *,
        missing: bool,
        fuses: bool,
    ) -> None:
        self._graph = graph
        self._compile = compile_piece
        self._places = places
        self._missing = missing
        self._fuses = fuses
        self._inputs = tuple(graph.gm.graph.find_nodes(op="placeholder"))
        self._names = tuple(node.name for node in self._inputs)
        gradients = gradients_of(graph.gm)
        self._count = len(gradients)
        self._without = [edge for edge, place in enumerate(graph.forward_tensors) if gradients[place] is None]
        self._whole: Boxed | None = None
        tangents = (place for place, name in enumerate(self._names) if name.startswith("tangents"))
        self._arriving = tuple(tangents)
        self._aliases: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._halves: dict[frozenset[int], _Halves] = {}

    def run(self, values: list[Any], edges: frozenset[int] | None) -> Sequence[Any]:
        """B, where no edges are asked for; I for these, where some are."""
        return self._run_whole(values) if edges is None else self._run_first(values, edges)

    def whole(self) -> Boxed:
        """What runs B."""
        if self._whole is None:
            self._whole = self._compile(self._graph)
        return self._whole

    def halves(self, edges: frozenset[int]) -> _Halves:
        """What runs I for these edges, and W."""
        halves = self._halves.get(edges)
        if halves is None:
            halves = self._halves[edges] = self._cut(edges)
        return halves

    def _run_whole(self, values: list[Any]) -> Sequence[Any]:
        run = self.whole()
        if self._without:
            hide_missing(self._without)
        taken_values = self._taken(values)
        # what is a view of a gradient in one layout is a copy in another
        layout = tuple([taken_values[place].stride() for place in self._arriving])
        aliases = self._aliases.get(layout)
        inputs = list(taken_values) if aliases is None else []
        results = run(taken_values)
        if aliases is None:
            aliases = self._aliases[layout] = _aliases(inputs, results)
        if not aliases:
            return results
        # autograd keeps each as ``.grad`` and adds the next one in place: into that of another parameter, or
        # into what is being sent
        return [value.clone() if place in aliases else value for place, value in enumerate(results)]

    def _run_first(self, values: list[Any], edges: frozenset[int]) -> Sequence[Any]:
        """I; W is left with the node."""
        halves = self.halves(edges)
        taken_values = self._taken(values)
        available = dict(zip(self._names, taken_values, strict=True))
        taken_values.clear()
        taken = [available[name] for name in halves.takes]
        kept = {name: available[name] for name in halves.keeps if name in available}
        wanted = {name: available[name] for _, name in halves.now if name in available}
        available.clear()
        if halves.first is not None:
            results_of_first = dict(zip(halves.makes, halves.first(taken), strict=True))
            wanted |= {name: results_of_first[name] for _, name in halves.now if name in results_of_first}
            kept |= {name: results_of_first[name] for name in halves.keeps if name in results_of_first}
        leave(partial(_second_half, halves, kept) if halves.later else None)
        results: list[Any] = [None] * self._count
        for position, name in halves.now:
            results[position] = wanted[name]
        return results

    def _taken(self, values: list[Any]) -> list[Any]:
        """The values of the inputs; zeros for a gradient that is missing and can't be left out."""
        if not self._missing:
            return values
        taken = [values[place] for place in self._places]
        values.clear()
        for number, node in enumerate(self._inputs):
            if taken[number] is None:
                taken[number] = zeros_like_example(node.meta["val"], taken, self._inputs)
        return taken

    def _cut(self, edges: frozenset[int]) -> _Halves:
        tensors = self._graph.forward_tensors
        wanted = {tensors[edge] for edge in edges}
        cut = cut_backward(self._graph.gm, wanted, static_inputs=self._graph.static_inputs, fuses=self._fuses)
        # what I returns is sent, or W reads it: nobody keeps it for long
        first, takes, makes = self._piece(cut.pieces.get(INPUTS), returned=0)
        second, second_takes, second_makes = self._piece(cut.pieces.get(WEIGHTS))
        edge_of = {position: edge for edge, position in enumerate(tensors)}
        now = tuple((place, cut.outputs[place]) for place in sorted(wanted) if cut.outputs[place] is not None)
        later = tuple(
            (edge_of[place], name)
            for place, name in enumerate(cut.outputs)
            if place not in wanted and place in edge_of and isinstance(name, str)
        )
        there = (name for _, name in later if name not in second_makes)
        keeps = tuple(dict.fromkeys((*second_takes, *there)))
        return _Halves(first, takes, makes, second, second_takes, second_makes, keeps, now, later)

    def _piece(
        self, piece: Piece | None, returned: int | None = None
    ) -> tuple[Boxed | None, tuple[str, ...], tuple[str, ...]]:
        """What runs a piece, with the names of its inputs and outputs; for ``returned`` see `AotGraph`."""
        if piece is None:
            return None, (), ()
        return self._compile(self._graph.piece(piece.module, returned)), piece.inputs, piece.outputs


def _aliases(inputs: Sequence[Any], results: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the results that lie in memory of an input, or of a result before them."""
    seen = {storage_key(value) for value in inputs if isinstance(value, Tensor)}
    aliases = []
    for place, value in enumerate(results):
        if isinstance(value, Tensor):
            key = storage_key(value)
            if key in seen:
                aliases.append(place)
            seen.add(key)
    return tuple(aliases)


def _second_half(halves: _Halves, kept: dict[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """W: the gradients, each with the number of the edge that it goes to."""
    taken = [kept[name] for name in halves.second_takes]
    there = {name: kept[name] for _, name in halves.later if name in kept}
    kept.clear()
    if halves.second is not None:
        with torch.no_grad(), autocast_off():  # as in I, which autograd and AOTAutograd run so
            there |= zip(halves.second_makes, halves.second(taken), strict=True)
    for edge, name in halves.later:
        yield edge, there[name]
