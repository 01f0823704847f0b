"""What of a model is captured as CUDA graphs, as frozen data for tables, HTML and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from partita.errors import ReportError

__all__ = ["BreakRow", "CaptureReport", "GraphRow", "LeftOutRow", "RegionRow"]


@dataclass(frozen=True, slots=True)
class RegionRow:
    """Operators that are captured, or could be, together.

    Args:
        name: of the region.
        device: on which all its tensors lie.
        nodes: how many operators.
        launches: kernels that they start; a replay starts one.
        copies: inputs copied in and outputs copied out at each replay.
        saved_s: seconds that a replay saves, by assumed costs; negative where it costs.
        first: name of its first operator.
        last: name of its last.
        captured: False for one that would save nothing.

    Raises:
        ReportError: a count is negative.
    """

    name: str
    device: str
    nodes: int
    launches: int
    copies: int
    saved_s: float
    first: str
    last: str
    captured: bool = True

    def __post_init__(self) -> None:
        for name in ("nodes", "launches", "copies"):
            if getattr(self, name) < 0:
                raise ReportError(f"RegionRow.{name} is {getattr(self, name)}; give 0 or more.")


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """Operators of one line of the user's code that are not captured.

    Args:
        source: ``file:line: code``, or an empty string.
        operators: what the line does, one text an operator.
        reason: why the first of them can't be captured.
        way_out: what the user can do.
    """

    source: str
    operators: tuple[str, ...]
    reason: str
    way_out: str


@dataclass(frozen=True, slots=True)
class BreakRow:
    """Where ``torch.compile`` ends a graph and runs Python before it begins the next.

    Args:
        source: ``file:line: code``, or an empty string.
        reason: why.
        way_out: what the user can do, or an empty string.
        kept: whether the graph went on here, by an option that is off by default.
        details: all that torch says of it, in many lines; may be empty.
    """

    source: str
    reason: str
    way_out: str
    kept: bool = False
    details: str = ""


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One graph of the model.

    Args:
        name: such as ``forward 0``.
        nodes: its operators.
        regions: in order; those that would save nothing at the end.
        left_out: what can't be captured.
    """

    name: str
    nodes: int
    regions: tuple[RegionRow, ...]
    left_out: tuple[LeftOutRow, ...]

    @property
    def captured_nodes(self) -> int:
        """Operators in regions that are captured."""
        return sum(region.nodes for region in self.regions if region.captured)

    @property
    def launches_saved(self) -> int:
        """Launches of kernels less launches of graphs, at each run."""
        return sum(region.launches - 1 for region in self.regions if region.captured)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """All that ``partita explain --for cudagraphs`` found.

    Args:
        title: what was explained.
        note: how far one can trust it.
        assumed: whether the device was not there.
        graphs: in the order in which they are made.
        breaks: between them.
        stopped: why the rest of the model is missing, or an empty string.
        environment: versions and the like.
    """

    title: str
    note: str
    assumed: bool
    graphs: tuple[GraphRow, ...]
    breaks: tuple[BreakRow, ...] = ()
    stopped: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))

    @property
    def summary(self) -> str:
        """What comes of it, in a sentence that leaves out nothing."""
        left_out = sum(len(row.operators) for graph in self.graphs for row in graph.left_out)
        small = sum(region.nodes for graph in self.graphs for region in graph.regions if not region.captured)
        ended = sum(not row.kept for row in self.breaks)
        kept = len(self.breaks) - ended
        counts = [f"{self.captured_nodes} of {self.nodes} operators captured"]
        counts += [f"{left_out} can't be"] if left_out else []
        counts += [f"{small} are too few to save time"] if small else []
        sentences = [f"{', '.join(counts)}; {self.launches_saved} launches saved a run"]
        if ended:
            sentences.append(f"Besides, code runs as Python at {_count(ended, 'place')}")
        if kept:
            places = _count(kept, "place")
            sentences.append(f"By default torch.compile ends the graph at {places} that it was kept at here")
        if self.stopped:
            sentences.append("The rest of the model could not be traced")
        return ". ".join(sentences)

    @property
    def nodes(self) -> int:
        """Operators of all graphs."""
        return sum(graph.nodes for graph in self.graphs)

    @property
    def captured_nodes(self) -> int:
        """Operators that are captured."""
        return sum(graph.captured_nodes for graph in self.graphs)

    @property
    def launches_saved(self) -> int:
        """Launches that are saved at each run, over all graphs."""
        return sum(graph.launches_saved for graph in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """Return dicts and lists for JSON, with the totals."""
        graphs = [
            asdict(graph) | {"captured_nodes": graph.captured_nodes, "launches_saved": graph.launches_saved}
            for graph in self.graphs
        ]
        return {
            "title": self.title,
            "note": self.note,
            "summary": self.summary,
            "assumed": self.assumed,
            "nodes": self.nodes,
            "captured_nodes": self.captured_nodes,
            "launches_saved": self.launches_saved,
            "graphs": graphs,
            "breaks": [asdict(item) for item in self.breaks],
            "stopped": self.stopped,
            "environment": dict(self.environment),
        }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
