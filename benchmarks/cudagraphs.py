"""How long does it take to find a graph's regions and to cut it there, against ``partition_cudagraphs``?

``partita bench cudagraphs``. CPU time of one process; nothing runs on a GPU. Every tenth node can't be
captured. All nodes have example values. `find` is `partita.cudagraphs.find_regions`, `partition` is
`partita.cudagraphs.partition_cudagraphs`, `torch` is
``torch.fx.passes.backends.cudagraphs.partition_cudagraphs``, which works the example values out again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.fx import Graph, GraphModule
from torch.fx.passes.backends.cudagraphs import partition_cudagraphs as torch_partition_cudagraphs

from benchmarks.harness import MIN_ROUNDS, Ratio, in_turn, ratio, slope, write_json

# there is no public way to example values on a GPU that is not there
from partita._torch.graph_module.example_values import example_tensors  # noqa: PLC2701
from partita.cudagraphs import find_regions, partition_cudagraphs

__all__ = ["Growth", "Row", "alternating", "main", "measure"]

_SIZES = (400, 1_000, 4_000, 10_000, 40_000)
"""Nodes."""
_TORCH_UP_TO = 4_000
"""There it takes up to a minute a round."""


@dataclass(frozen=True)
class Row:
    """One size: seconds are medians, the ratio is the median of rounds.

    Attributes:
        gain: torch's time over that of `partition`; None where torch was left out.
    """

    nodes: int
    regions: int
    seconds: dict[str, float]
    gain: Ratio | None


@dataclass(frozen=True)
class Growth:
    """Slope of log time over log nodes; 1 is linear."""

    side: str
    slope: float


def main(
    *, quick: bool = False, json_path: Path | None = None, console: Console | None = None
) -> list[Row | Growth]:
    """Measure every size, print two tables, and write JSON where a path is given.

    Args:
        quick: tiny graphs and one round: whether it runs, not how fast.
    """
    console = console or Console()
    rows = []
    for nodes in (40, 80) if quick else _SIZES:
        console.print(f"{nodes} nodes, {nodes // 10} regions", style="dim")
        rows.append(measure(nodes, 1 if quick else MIN_ROUNDS))
    growth = [
        Growth(side, slope([row.nodes for row in of_side], [row.seconds[side] for row in of_side]))
        for side in ("find", "partition", "torch")
        if (of_side := [row for row in rows if side in row.seconds])
    ]
    table = Table("nodes", "regions", "find (s)", "partition (s)", "torch (s)", "torch / partition")
    for row in rows:
        seconds = [
            f"{row.seconds[side]:.3f}" if side in row.seconds else "-"
            for side in ("find", "partition", "torch")
        ]
        table.add_row(str(row.nodes), str(row.regions), *seconds, str(row.gain) if row.gain else "-")
    console.print(table)
    for item in growth:
        console.print(f"{item.side}: slope of log time over log nodes {item.slope:.2f}")
    write_json(json_path, "cudagraphs", [*rows, *growth])
    return [*rows, *growth]


def measure(nodes: int, rounds: int) -> Row:
    """Measure one size of graph."""
    gm = alternating(nodes)
    example = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    subjects: dict[str, Callable[[], object]] = {
        "find": lambda: find_regions(gm),
        "partition": lambda: partition_cudagraphs(gm, example),
    }
    if nodes <= _TORCH_UP_TO:
        # torch's changes the graph that it is given
        fresh = [alternating(nodes) for _ in range(rounds + 1)]
        subjects["torch"] = lambda: torch_partition_cudagraphs(fresh.pop(), example)
    seconds = in_turn(subjects, rounds=rounds)
    return Row(
        nodes,
        len(find_regions(gm).regions),
        {name: statistics.median(taken) for name, taken in seconds.items()},
        ratio(seconds["torch"], seconds["partition"]) if "torch" in seconds else None,
    )


def alternating(nodes: int, length: int = 10) -> GraphModule:
    """Make a graph of nine operators on the GPU, one that takes the value to the host, and so on."""
    graph = Graph()
    here, there = example_tensors((4, 4), ("cuda", "cpu"))
    value = graph.placeholder("x")
    value.meta["val"] = here
    move = torch.ops.aten.to.device
    for number in range(nodes):
        place = number % length
        if place == length - 1:
            value = graph.call_function(move, (value, torch.device("cpu"), torch.float32))
        elif place == 0 and number:
            value = graph.call_function(move, (value, torch.device("cuda", 0), torch.float32))
        else:
            value = graph.call_function(torch.ops.aten.sin.default, (value,))
        value.meta["val"] = there if place == length - 1 else here
    graph.output(value)
    return GraphModule(torch.nn.Module(), graph)
