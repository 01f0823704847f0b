"""How many steps a rank has made: the place in its random numbers, which a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepCount"]


@dataclass(slots=True)
class StepCount:
    """What a schedule counts, shared with its stages, so that who saves or loads these finds it there.

    Attributes:
        steps: training steps made.
        start: where a schedule begins that is made later with the same stages: what was loaded into them.
    """

    steps: int = 0
    start: int = 0

    def load(self, steps: int) -> None:
        """Go on from there."""
        self.steps = self.start = steps
