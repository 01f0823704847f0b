"""The splitter: one graph in, pieces out, observably equal."""

from __future__ import annotations

from partita.splitter.drop_in import Partition, partitions_of, split_module
from partita.splitter.result import Conflict, Edge, Piece, Split, SplitReport
from partita.splitter.split import split

__all__ = [
    "Conflict",
    "Edge",
    "Partition",
    "Piece",
    "Split",
    "SplitReport",
    "partitions_of",
    "split",
    "split_module",
]
