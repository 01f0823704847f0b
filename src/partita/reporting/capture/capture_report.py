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
    """

    source: str
    reason: str
    way_out: str


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
            "assumed": self.assumed,
            "nodes": self.nodes,
            "captured_nodes": self.captured_nodes,
            "launches_saved": self.launches_saved,
            "graphs": graphs,
            "breaks": [asdict(item) for item in self.breaks],
            "stopped": self.stopped,
            "environment": dict(self.environment),
        }
