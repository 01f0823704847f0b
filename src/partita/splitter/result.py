"""The result of a split: pieces, edges, and a report of the decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.modules.contents import named_state
from partita.errors import PieceNameError
from partita.graph.structure import structural_hash

__all__ = ["Conflict", "Edge", "Piece", "Split", "SplitReport"]


@dataclass(frozen=True)
class Piece:
    """One part of a cut graph.

    Attributes:
        name: its name in the stitched module, ``submod_<key>``.
        key: what the assignment returned for its nodes.
        module: the piece, a ``GraphModule`` that owns its parameters under their original names.
        inputs: names of the original values that it takes, in the order of its arguments.
        outputs: names of the original values that it returns. None: returns ``()``; one: the bare value;
            more: a tuple.
        node_names: names of its nodes, in order; they are those of the original graph.
    """

    name: str
    key: Any
    module: GraphModule = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    node_names: tuple[str, ...] = field(repr=False)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Original names of the parameters and buffers that it holds; a tied one comes under each name."""
        return tuple(name for name, _ in named_state(self.module))

    @cached_property
    def structural_hash(self) -> str:
        """A hash that is equal for pieces which compute the same for inputs of the same shapes and dtypes."""
        return structural_hash(self.module.graph, self.module)


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one piece computes and another one uses.

    ``producer`` is None for the inputs and attributes of the stitched module, ``consumer`` for its outputs.
    ``shape``, ``dtype`` and ``bytes`` are None where the graph has no metadata for the value or it is no
    tensor; ``bytes`` also where a dimension is symbolic.
    """

    producer: str | None
    consumer: str | None
    value: str
    shape: tuple[int | torch.SymInt, ...] | None = None
    dtype: torch.dtype | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Conflict:
    """Pieces that could not be ordered as assigned, and what was done about it."""

    pieces: tuple[str, ...]
    chain: tuple[str, ...]
    """Names of nodes along the cycle."""
    explanation: str
    """A line for each step of the cycle: which node must run before which, and why."""
    repaired_into: Mapping[str, int] = field(default_factory=dict)
    """For each piece that was divided, the number of its parts."""


@dataclass(frozen=True)
class SplitReport:
    """The decisions that were made for a split.

    Attributes:
        conflicts: cycles between pieces that were repaired, under ``on_conflict="repair"``.
        reordered: whether nodes run in another order than in the original graph. Only then may a gradient
            that is summed from three or more uses differ in its last bits: floating-point addition is not
            associative.
        shared: original names of the parameters and buffers that several pieces use, with the names of those
            pieces.
        notes: conditions on the inputs, a line each.
    """

    conflicts: tuple[Conflict, ...] = ()
    reordered: bool = False
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"order of nodes: {'changed' if self.reordered else 'as in the original'}"]
        lines += [f"{name}: used by {', '.join(pieces)}" for name, pieces in self.shared.items()]
        for conflict in self.conflicts:
            lines.append(f"conflict between {', '.join(conflict.pieces)}:\n{conflict.explanation}")
            lines += [
                f"  {piece} was divided into {parts}" for piece, parts in conflict.repaired_into.items()
            ]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Split:
    """A graph in pieces.

    Attributes:
        module: the stitched module: called like the original, it runs the pieces in order.
        pieces: in the order in which they run.
        edges: every value that one piece computes and another one uses.
        report: what was decided, and why.
    """

    module: GraphModule = field(repr=False)
    pieces: tuple[Piece, ...]
    edges: tuple[Edge, ...] = field(repr=False)
    report: SplitReport = field(repr=False)

    def __getitem__(self, name: str) -> Piece:
        """Return the piece of that name."""
        for piece in self.pieces:
            if piece.name == name:
                return piece
        raise PieceNameError(
            f"no piece called {name!r}; there are {', '.join(piece.name for piece in self.pieces)}"
        )
