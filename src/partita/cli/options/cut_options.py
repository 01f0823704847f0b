"""Where a command cuts a model: ``--stages`` or ``--split-at``, checked before a model is made."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from partita.cli.models.user_file import Built
from partita.errors import UsageError
from partita.listing import listed
from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.frontends.cuts.cuts import Place
from partita.pipelining.frontends.graph.pipe import GraphPipe

__all__ = ["CutRequest"]


@dataclass(frozen=True)
class CutRequest:
    """One of the two.

    Attributes:
        stages: how many, planned from measured costs.
        split_at: names of modules at which a stage begins; ``block@1`` is the second call of ``block``.

    Raises:
        UsageError: both or none, a number out of range, or a name that is given twice.
    """

    stages: int | None = None
    split_at: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stages is not None and self.split_at:
            raise UsageError(f"--stages is {self.stages}, and --split-at says it too: leave one of them out")
        if self.stages is None and not self.split_at:
            raise UsageError(
                "there is neither --stages nor --split-at: give --stages 2, or --split-at NAME, a module "
                "at which a stage begins"
            )
        if self.stages is not None and self.stages < 1:
            raise UsageError(f"--stages is {self.stages}: give 1 or more")
        twice = [name for number, name in enumerate(self.split_at) if name in self.split_at[:number]]
        if twice:
            raise UsageError(f"--split-at {twice[0]} is given twice: leave one of them out")

    @property
    def number(self) -> int:
        """How many stages are asked for."""
        return len(self.split_at) + 1 if self.stages is None else self.stages

    def cut(self, built: Built, *, has_values: bool = True) -> GraphPipe:
        """Cut the model.

        Args:
            has_values: False for a model on the meta device, for which nothing can be proven, and for one
                size of the batch only.

        Raises:
            ModuleNameError: there is no such module; before the model is captured.
            CaptureError: the model can't be captured or cut.
            InfeasiblePlan: there are more stages than units; before these are measured.
            UsageError: one of the names makes no stage.
        """
        places: dict[Place, SplitPoint] = dict.fromkeys(self.split_at, SplitPoint.BEGINNING)
        with redirect_stdout(sys.stderr):  # what the model prints is no part of the answer
            pipe = pipeline(
                built.model,
                built.args,
                built.kwargs,
                places or None,
                stages=self.stages,
                prove=has_values,
                dynamic_shapes=None if has_values else False,
            )
        assert isinstance(pipe, GraphPipe)  # as frontend="export" makes it
        if pipe.num_stages != self.number:
            raise UsageError(
                f"--split-at {listed(self.split_at)} makes {pipe.num_stages} "
                f"{'stage' if pipe.num_stages == 1 else 'stages'} and not {self.number}: "
                "nothing is computed before one of these modules, or between two of them; leave that one out"
            )
        return pipe
