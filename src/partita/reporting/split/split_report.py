"""What the pieces of a model are, as frozen data for tables, drawings, HTML and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from partita.errors import ReportError
from partita.reporting.drawing.checks import require_quantity

__all__ = ["CrossingRow", "PieceRow", "StagesReport", "TiedRow"]


@dataclass(frozen=True, slots=True)
class PieceRow:
    """One stage.

    Args:
        stage: its number, from 0.
        modules: names of what it holds, best shortened by `partita.reporting.summarise_modules`.
        operations: how many nodes of the graph it runs.
        parameters: how many numbers its parameters hold; a tied parameter counts in each stage.
        parameter_bytes: their size.
        buffer_bytes: the size of its buffers.

    Raises:
        ReportError: a quantity is negative.
    """

    stage: int
    modules: tuple[str, ...]
    operations: int
    parameters: int
    parameter_bytes: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        for name in ("stage", "operations", "parameters", "parameter_bytes", "buffer_bytes"):
            require_quantity("PieceRow", name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class CrossingRow:
    """What one microbatch sends from a stage to a later one, and what comes back.

    Args:
        sender: the earlier stage.
        receiver: the later stage.
        values: name, dtype and shape of each value.
        forward_bytes: their size.
        backward_bytes: the size of the gradients that come back on this way.

    Raises:
        ReportError: a quantity is negative, or the receiver is not a later stage.
    """

    sender: int
    receiver: int
    values: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int

    def __post_init__(self) -> None:
        for name in ("sender", "receiver", "forward_bytes", "backward_bytes"):
            require_quantity("CrossingRow", name, getattr(self, name))
        if self.receiver <= self.sender:
            raise ReportError(
                f"CrossingRow goes from stage {self.sender} to {self.receiver}; give a later stage."
            )

    @property
    def is_skip(self) -> bool:
        """Whether it goes past a stage."""
        return self.receiver > self.sender + 1


@dataclass(frozen=True, slots=True)
class TiedRow:
    """One parameter that several stages hold.

    Args:
        names: its names in the model.
        stages: the stages.
        bytes: its size.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class StagesReport:
    """All that ``partita split`` shows.

    Args:
        title: what was cut.
        note: whether it was compared with the model.
        pieces: one a stage, in order.
        crossings: by sender and receiver.
        tied: the parameters that several stages hold.
        environment: versions and the like. Copied, and read-only afterwards.

    Raises:
        ReportError: no pieces, or a crossing of a stage that is not there.
    """

    title: str
    note: str
    pieces: tuple[PieceRow, ...]
    crossings: tuple[CrossingRow, ...] = ()
    tied: tuple[TiedRow, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if [piece.stage for piece in self.pieces] != list(range(len(self.pieces))) or not self.pieces:
            raise ReportError("StagesReport.pieces are not those of stages 0, 1, 2 ...; give one a stage.")
        for row in self.crossings:
            if row.receiver >= len(self.pieces):
                raise ReportError(
                    f"StagesReport has {len(self.pieces)} pieces and a crossing to stage {row.receiver}."
                )
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))

    def entering(self, stage: int) -> tuple[CrossingRow, ...]:
        """What comes to a stage, from the one before it first."""
        rows = [row for row in self.crossings if row.receiver == stage]
        return tuple(sorted(rows, key=lambda row: -row.sender))

    def as_dict(self) -> dict[str, Any]:
        """Return dicts and lists for JSON."""
        return {
            "title": self.title,
            "note": self.note,
            "stages": [asdict(piece) for piece in self.pieces],
            "crossings": [asdict(row) for row in self.crossings],
            "tied": [asdict(row) for row in self.tied],
            "environment": dict(self.environment),
        }
