"""How many steps a rank has made, on which its random numbers depend; a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepCount"]


@dataclass(slots=True)
class StepCount:
    """The steps of a schedule; shared with its stages, so that saving or loading a stage includes it.

    Attributes:
        steps: training steps made.
        start: where a later schedule of the same stages begins to count: what was loaded into them.
    """

    steps: int = 0
    start: int = 0

    def load(self, steps: int) -> None:
        """Go on from there."""
        self.steps = self.start = steps
