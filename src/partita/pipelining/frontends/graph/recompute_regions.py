"""Puts the regions of a stage that are recomputed into modules of their own.

The stage keeps its parameters and buffers, and hands them in::

    stage   weight ──┬──────────────────┐               stage   weight ──┬─────────────────┐
            x ── linear ── gelu ── linear ──     -->            x ── linear ── (gelu ── linear) ──
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import REGION_SWITCHES
from partita.capture.tracing.module_paths import module_calls
from partita.errors import ModuleNameError
from partita.graph.effects import analyse
from partita.pipelining.recompute.region import CheckpointedRegion
from partita.runtime import enter_site
from partita.splitter import Piece, Split, split

__all__ = ["Region", "regions_of_modules", "regions_of_units", "with_regions"]

Region = frozenset[str]
"""The names of a region's nodes."""


def regions_of_modules(whole: GraphModule, patterns: Sequence[str]) -> list[Region]:
    """Return one region for each call of a submodule whose name fits a pattern.

    Args:
        patterns: qualified names, where ``*`` stands for any one part: ``"blocks.*.mlp"``.

    Raises:
        ModuleNameError: no operation belongs to a submodule that fits.
    """
    calls: dict[tuple[str, int], set[str]] = {}
    for node in whole.graph.nodes:
        if node.op.startswith("call_"):
            for path, number in module_calls(node):
                if not path:
                    continue  # the model itself
                calls.setdefault((path, number), set()).add(node.name)
    regions = []
    for pattern in patterns:
        fitting = [frozenset(names) for (path, _), names in calls.items() if _fits(path, pattern)]
        if not fitting:
            paths = sorted({path for path, _ in calls})
            raise ModuleNameError(
                f"recompute={pattern!r}: no operation of the graph belongs to a module of that name; there "
                f"are {', '.join(paths[:5])}{', ...' if len(paths) > 5 else ''}; '*' stands for one part"
            )
        regions += fitting
    return regions


def _fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        want in ("*", part) for part, want in zip(parts, wanted, strict=True)
    )


def regions_of_units(
    whole: GraphModule, ends: Sequence[int], units: Sequence[tuple[int, int]]
) -> list[Region]:
    """Return the regions that go from one unit of a plan to another.

    Args:
        ends: for each unit but the last, the position of the node at which it ends.
        units: (first, last) of each region.
    """
    names = [node.name for node in whole.graph.nodes if node.op.startswith("call_")]
    positions = [position for position, node in enumerate(whole.graph.nodes) if node.op.startswith("call_")]
    regions = []
    for first, last in units:
        start = ends[first - 1] if first else -1
        end = ends[last] if last < len(ends) else len(whole.graph.nodes)
        regions.append(
            frozenset(
                name for name, position in zip(names, positions, strict=True) if start < position <= end
            )
        )
    return regions


def with_regions(cut: Split, regions: Sequence[Region]) -> tuple[Split, frozenset[int]]:
    """Return the same cut, whose stages recompute these regions, and the stages that they fill.

    Of regions within one another the outer one counts.
    """
    pieces, filled = [], set()
    for stage, piece in enumerate(cut.pieces):
        spans = list(_outermost(_spans(piece.module, regions)))
        if spans == [_computing(piece.module)]:
            filled.add(stage)
        elif spans:
            piece = _with_spans(piece, spans, stage)
            cut.module.add_module(piece.name, piece.module)
        pieces.append(piece)
    return replace(cut, pieces=tuple(pieces)), frozenset(filled)


_Span = tuple[int, int]
"""The positions of the first and the last node of a region in a stage's graph."""


def _spans(stage: GraphModule, regions: Sequence[Region]) -> Iterator[_Span]:
    nodes = list(stage.graph.nodes)
    position = {node.name: number for number, node in enumerate(nodes)}
    for region in regions:
        own = [position[name] for name in region if name in position]
        if own:
            first = min(own)
            seeded = nodes[first - 1].target is enter_site  # belongs to the random node behind it
            yield first - seeded, max(own)


def _outermost(spans: Iterator[_Span]) -> Iterator[_Span]:
    end = -1
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        if first > end:
            yield first, last
            end = last


def _computing(stage: GraphModule) -> _Span:
    """From the first to the last node that computes something."""
    own = [number for number, node in enumerate(stage.graph.nodes) if _computes(node)]
    return min(own), max(own)


def _computes(node: Node) -> bool:
    return node.op.startswith("call_") and node.target not in REGION_SWITCHES


def _with_spans(piece: Piece, spans: Sequence[_Span], stage: int) -> Piece:
    keys: dict[str, str] = {}
    for number, node in enumerate(piece.module.graph.nodes):
        if not node.op.startswith("call_"):
            continue
        before = sum(last < number for _, last in spans)
        inside = before < len(spans) and spans[before][0] <= number
        keys[node.name] = f"recomputed_{before}" if inside else f"kept_{before}"
    inner = split(piece.module, keys, shared="root")
    written = _written(piece.module)
    for part in inner.pieces:
        if not part.key.startswith("recomputed"):
            continue
        places = [place for place, name in enumerate(part.inputs) if written.get(name, True)]
        where = f"the region of stage {stage} from {part.node_names[0]} to {part.node_names[-1]}"
        inner.module.add_module(part.name, CheckpointedRegion(part.module, where, places))
    return replace(piece, module=inner.module)


def _written(stage: GraphModule) -> Mapping[str, bool]:
    """For each value by name whether anything writes to its memory."""
    effects = analyse(stage)
    memory = {
        identity
        for position in effects.writers
        for operand in effects.by_position[position].writes
        for identity in effects.storages[effects.index[operand]]
    }
    own: Mapping[str, Collection[int]] = {
        node.name: effects.storages[position] if effects.storages else ()
        for position, node in enumerate(effects.nodes)
    }
    return {name: not memory.isdisjoint(storages) for name, storages in own.items()}
