"""What a step needs before it begins: the first stage's arguments, and what will cross every border.

Stages of a captured model know that from the sizes of the batch, which the first stage's rank tells the
others (`CapturedPreparation`); stages that are plain modules find it out from one another (`ShapeExchange`).
Both do it in two parts, so that what a rank can find wrong by itself is found before it waits for another::

    accept     the rank's own arguments, looked at
               the ranks agree on what the step is, and hear of the sizes    (`StepAgreement`)
    prepare    a `PreparedStep`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from partita.pipelining.blocks.stage import BlockStage
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.graph_stage import GraphStage
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.agreement import BatchSizes
from partita.pipelining.steps.arguments import Microbatches, StepArguments, cut_arguments, given_arguments
from partita.pipelining.steps.precision import Precision
from partita.runtime import Comm

__all__ = ["Accepted", "CapturedPreparation", "PreparedStep", "StepPreparation"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What this rank was given for a step, once it has been looked at.

    Attributes:
        sizes: of the microbatches, where this rank is the one that knows them.
        arguments: for each microbatch the tensors among the first stage's arguments, by name; None where they
            are not known yet, and on ranks without the first stage.
        microbatches: what stages that are plain modules are called with.
        made: the microbatches that the user has made.
    """

    sizes: BatchSizes = field(default_factory=BatchSizes)
    arguments: list[dict[str, Tensor]] | None = None
    microbatches: Microbatches | None = None
    made: Microbatches | None = None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """All that crosses in a step, and what begins it.

    Attributes:
        arguments: for each microbatch the tensors among the first stage's arguments, by name; None on ranks
            without the first stage.
        samples: how many each microbatch has; empty where this rank has not heard.
        routes: for each microbatch, with its sizes and dtypes; empty where all have those of the pipeline.
        changed: whether other values cross than in the step before, and not only of other sizes.
    """

    arguments: list[dict[str, Tensor]] | None
    samples: tuple[int, ...]
    routes: tuple[Routes, ...] = ()
    changed: bool = False


class StepPreparation(Protocol):
    """One rank's, with what it remembers from earlier steps."""

    def accept(self, given: StepArguments) -> Accepted:
        """Look at what this rank is given. Waits for nobody.

        Raises:
            MicrobatchError: a batch that can't be cut.
            SignatureMismatch: what the pipeline was not cut for.
        """
        ...

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """Work out what crosses. Collective.

        Args:
            accepted: with the sizes that all ranks have heard.
        """
        ...


class CapturedPreparation:
    """Of stages of a captured model, and of those that run the model's own code.

    Args:
        stages: those of this rank, by index.
        microbatches: how many a step has.
    """

    def __init__(self, stages: Mapping[int, Stage], comm: Comm, microbatches: int) -> None:
        self._stages = stages
        self._comm = comm
        self._microbatches = microbatches
        self._precision = Precision()

    def accept(self, given: StepArguments) -> Accepted:
        """See `StepPreparation`."""
        first, made = self._stages.get(0), given.microbatches()
        if first is None:
            return Accepted(made=made)
        if isinstance(first, BlockStage):
            batch = made or Microbatches.of(given.cut(first=True))
            sizes = BatchSizes(batch.samples, ((),) * len(batch.samples))
            return Accepted(sizes, [first.arguments(*part) for part in batch.parts], made=made)
        assert isinstance(first, GraphStage)
        if made is None:
            arguments, sizes = cut_arguments(first, given.cut(first=True), train=given.train)
        else:
            arguments, sizes = given_arguments(first, made, train=given.train)
        return Accepted(sizes, arguments, made=made)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`."""
        stage, sizes = next(iter(self._stages.values())), accepted.sizes
        routes = stage.routes
        cast = self._precision.routes(self._comm, self._stages, routes, *sizes.open[:1])
        crossing: tuple[Routes, ...] = ()
        if routes.symbols:
            crossing = tuple(cast.at(one, stage.module.training) for one in sizes.open)
        elif cast is not routes:
            crossing = (cast,) * self._microbatches
        for each in self._stages.values():
            each.crossing = crossing
        return PreparedStep(accepted.arguments, sizes.samples, crossing)
