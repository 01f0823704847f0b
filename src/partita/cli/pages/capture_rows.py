"""What `partita.cudagraphs.explain` found, as the rows that tables, HTML and JSON show."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from partita._torch.compile.graph_breaks import Break
from partita._version import __version__
from partita.cudagraphs.explain import ExplainedGraph, Explanation
from partita.cudagraphs.regions import Refusal, Region
from partita.reporting import BreakRow, CaptureReport, GraphRow, LeftOutRow, RegionRow

__all__ = ["capture_report"]


def capture_report(explanation: Explanation, title: str) -> CaptureReport:
    """Turn an explanation into the rows that tables, HTML and JSON show."""
    counts: dict[str, int] = {}
    graphs = []
    for graph in explanation.graphs:
        number = counts.setdefault(graph.kind, 0)
        counts[graph.kind] += 1
        graphs.append(_graph_row(graph, f"{graph.kind} {number}"))
    return CaptureReport(
        title,
        explanation.note,
        explanation.assumed,
        tuple(graphs),
        (
            *(_break_row(item, kept=False) for item in explanation.breaks),
            *(_break_row(item, kept=True) for item in explanation.kept),
        ),
        explanation.stopped,
        {
            "partita": __version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "judged on": f"{explanation.device}{' (assumed)' if explanation.assumed else ''}",
        },
    )


def _break_row(item: Break, *, kept: bool) -> BreakRow:
    return BreakRow(_short(item.source), item.reason, item.hint, kept, item.details)


def _graph_row(graph: ExplainedGraph, name: str) -> GraphRow:
    regions = [_region_row(region, captured=True) for region in graph.plan.regions]
    regions += [_region_row(region, captured=False) for region in graph.plan.too_small]
    return GraphRow(name, graph.nodes, tuple(regions), tuple(_left_out(graph.plan.refusals)))


def _region_row(region: Region, *, captured: bool) -> RegionRow:
    ends = region.nodes[0], region.nodes[-1]
    counts = len(region.nodes), region.launches, region.copies
    return RegionRow(region.key, str(region.device), *counts, region.saved_s, *ends, captured)


def _left_out(refusals: tuple[Refusal, ...]) -> Iterator[LeftOutRow]:
    """One row a line of code; the first operator of a line is the one that matters to the others."""
    lines: dict[str, list[Refusal]] = {}
    for number, refusal in enumerate(refusals):
        lines.setdefault(refusal.source or f"{number}", []).append(refusal)
    for together in lines.values():
        first = together[0]
        operators = tuple(refusal.what for refusal in together)
        yield LeftOutRow(_short(first.source), operators, first.reason, first.way_out)


def _short(source: str) -> str:
    """A file below the current folder by its path from there."""
    return source.removeprefix(f"{Path.cwd()}/")
