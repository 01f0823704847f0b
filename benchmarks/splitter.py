"""How long does a split take, against torch's ``split_module`` and against copying the graph once?

``partita bench splitter``. CPU time of one process; pieces are contiguous. `split` is `partita.split`,
`drop-in` is `partita.splitter.split_module`, `torch` is ``torch.fx.passes.split_module``, `copy` is
``Graph().graph_copy``.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch.fx import Graph, GraphModule
from torch.fx.passes.split_module import split_module as torch_split_module

import partita
from benchmarks.harness import MIN_ROUNDS, Ratio, in_turn, ratio, slope, write_json
from benchmarks.subjects import SHAPES, assignment
from partita.splitter import split_module

__all__ = ["Case", "Memory", "Row", "Slope", "main", "measure"]

What = Literal["split", "split and first run"]


@dataclass(frozen=True)
class Row:
    """One size: seconds are medians, ratios are medians of rounds.

    Attributes:
        keep_original_order: the option of ``split_module``, theirs and ours.
        of_copy: `split` over one copy of the graph.
        gain: torch's time over that of `split`.
        drop_in_gain: torch's time over that of `drop-in`.
    """

    shape: str
    nodes: int
    pieces: int
    what: What
    keep_original_order: bool
    seconds: dict[str, float]
    of_copy: Ratio
    gain: Ratio | None
    drop_in_gain: Ratio | None


@dataclass(frozen=True)
class Slope:
    """Growth of one side's time with the number of nodes, everything else equal; 1 is linear."""

    shape: str
    pieces: int
    what: What
    keep_original_order: bool
    side: str
    slope: float


@dataclass(frozen=True)
class Memory:
    """What a split takes at its peak beside the graph that is split, in bytes a node."""

    shape: str
    nodes: int
    pieces: int
    bytes_per_node: float


@dataclass(frozen=True)
class Case:
    """What is measured at every size."""

    shape: str
    pieces: int
    what: What = "split"
    keep_original_order: bool = False
    torch_up_to: int = 100_000
    """Above this many nodes torch is left out: it is quadratic in some modes, and takes most of the time."""


_CASES = (
    Case("chain", 8, torch_up_to=40_000),
    Case("chain", 1000),
    Case("transformer", 8, torch_up_to=40_000),
    Case("transformer", 1000),
    Case("inputs", 8, keep_original_order=True, torch_up_to=10_000),
    Case("chain", 1000, "split and first run"),
    Case("different", 1000, "split and first run"),
    Case("woven", 1000, "split and first run"),
)
_SIZES = (1_000, 10_000, 40_000, 100_000)
_QUICK_SIZES = (60, 120)


def main(
    *, quick: bool = False, json_path: Path | None = None, console: Console | None = None
) -> list[Row | Slope | Memory]:
    """Measure every case, print two tables, and write JSON where a path is given.

    Args:
        quick: tiny graphs and one round: whether it runs, not how fast.
    """
    console = console or Console()
    sizes, rounds = (_QUICK_SIZES, 1) if quick else (_SIZES, MIN_ROUNDS)
    rows: list[Row] = []
    slopes: list[Slope] = []
    for case in _CASES:
        measured = []
        for nodes in sizes:
            pieces = min(case.pieces, nodes // 2)
            console.print(f"{case.shape}, {nodes} nodes, {pieces} pieces: {case.what}", style="dim")
            measured.append(measure(case, nodes, pieces, rounds))
        rows += measured
        slopes += _slopes(case, measured)
    cells = (
        [("chain", sizes[0])]
        if quick
        else [(shape, nodes) for shape in ("chain", "inputs") for nodes in sizes]
    )
    memory = [_memory(shape, nodes, min(1000, nodes // 2)) for shape, nodes in cells]
    _print(console, rows, slopes, memory)
    write_json(json_path, "splitter", [*rows, *slopes, *memory])
    return [*rows, *slopes, *memory]


def measure(case: Case, nodes: int, pieces: int, rounds: int) -> Row:
    """Measure a case at one size."""
    what, keep_original_order = case.what, case.keep_original_order
    with_torch = nodes <= case.torch_up_to
    gm = SHAPES[case.shape](nodes, pieces)
    keys = assignment(gm, pieces)
    inputs = [torch.ones(1, 2, 4) for node in gm.graph.nodes if node.op == "placeholder"]

    def finish(module: GraphModule) -> GraphModule:
        if what == "split and first run":
            module(*inputs)
        return module

    subjects: dict[str, Callable[[], object]] = {
        "copy": lambda: Graph().graph_copy(gm.graph, {}),
        "split": lambda: finish(partita.split(gm, keys).module),
        "drop-in": lambda: finish(
            split_module(gm, None, keys.__getitem__, keep_original_order=keep_original_order)
        ),
    }
    if with_torch:
        subjects["torch"] = lambda: finish(
            torch_split_module(gm, gm, keys.__getitem__, keep_original_order=keep_original_order)
        )
    with torch.no_grad():
        seconds = in_turn(subjects, rounds=rounds)
    return Row(
        case.shape,
        nodes,
        pieces,
        what,
        keep_original_order,
        {name: statistics.median(taken) for name, taken in seconds.items()},
        ratio(seconds["split"], seconds["copy"]),
        ratio(seconds["torch"], seconds["split"]) if with_torch else None,
        ratio(seconds["torch"], seconds["drop-in"]) if with_torch else None,
    )


def _slopes(case: Case, rows: list[Row]) -> list[Slope]:
    slopes = []
    for side in ("copy", "split", "drop-in", "torch"):
        of_side = [row for row in rows if side in row.seconds]
        if len(of_side) > 1:
            growth = slope([row.nodes for row in of_side], [row.seconds[side] for row in of_side])
            slopes.append(Slope(case.shape, case.pieces, case.what, case.keep_original_order, side, growth))
    return slopes


def _memory(shape: str, nodes: int, pieces: int) -> Memory:
    """Measure in a process of its own, where nothing else is alive."""
    command = [sys.executable, "-m", "benchmarks.splitter", shape, str(nodes), str(pieces)]
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=600)
    return Memory(shape, nodes, pieces, float(result.stdout) / nodes)


def _peak_of_split(shape: str, nodes: int, pieces: int) -> int:
    """Return the bytes that Python's allocator holds for a split at the most, beyond those before.

    Not the process's resident memory: generating the code of a large graph, which is needed to have one to
    split, takes more than the split, and what is free again is used again.
    """
    gm = SHAPES[shape](nodes, pieces)
    keys = assignment(gm, pieces)
    warm = SHAPES[shape](20, 2)
    partita.split(warm, assignment(warm, 2))
    gc.collect()
    tracemalloc.start()
    cut = partita.split(gm, keys)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del cut
    return peak


def _print(console: Console, rows: list[Row], slopes: list[Slope], memory: list[Memory]) -> None:
    table = Table("graph", "nodes", "pieces", "what", "split / copy", "torch / split", "torch / drop-in")
    for row in rows:
        name = row.shape + (" (keep_original_order)" if row.keep_original_order else "")
        gains = [str(gain) if gain is not None else "-" for gain in (row.gain, row.drop_in_gain)]
        table.add_row(name, str(row.nodes), str(row.pieces), row.what, str(row.of_copy), *gains)
    console.print(table)
    growth = Table("graph", "pieces", "what", "side", "slope of log time over log nodes")
    for item in slopes:
        growth.add_row(item.shape, str(item.pieces), item.what, item.side, f"{item.slope:.2f}")
    console.print(growth)
    for entry in memory:
        console.print(
            f"{entry.shape}, {entry.nodes} nodes, {entry.pieces} pieces: "
            f"{entry.bytes_per_node:.0f} bytes a node"
        )


if __name__ == "__main__":
    print(_peak_of_split(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
