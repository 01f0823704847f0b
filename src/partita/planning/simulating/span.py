"""One action of a rank with its times, as the simulator gives it."""

from __future__ import annotations

from dataclasses import dataclass

from partita.planning.schedules.actions import Action

__all__ = ["Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank with the seconds, from the start of the step, at which it starts and ends."""

    rank: int
    action: Action
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s
