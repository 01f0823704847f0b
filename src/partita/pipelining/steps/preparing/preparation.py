"""What a step needs before it begins: the first stage's arguments, and what will cross every border.

For stages of a captured model it follows from the sizes of the batch, which the first stage's rank sends to
the others (`CapturedPreparation`); stages of the user's own modules tell one another (`ShapeExchange`). Both
have two parts, so that a rank raises what is wrong with its own arguments before it waits for another::

    accept     checks the rank's own arguments
               the ranks compare what the step is, and send its sizes    (`StepAgreement`)
    prepare    returns a `PreparedStep`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from partita.errors import SignatureMismatch
from partita.pipelining.blocks.stage import BlockStage
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.graph_stage import GraphStage
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.agreement import BatchSizes
from partita.pipelining.steps.preparing.arguments import (
    Microbatches,
    StepArguments,
    arguments_of_batch,
    arguments_of_microbatches,
)
from partita.pipelining.steps.preparing.precision import Precision
from partita.runtime import Comm

__all__ = ["Accepted", "CapturedPreparation", "PreparedStep", "StepPreparation"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What this rank was given for a step, checked.

    Attributes:
        sizes: those of the microbatches, on the rank that knows them.
        arguments: for each microbatch the tensors among the first stage's arguments, by name; None where they
            have no names yet, and on ranks without the first stage.
        microbatches: the arguments of stages of the user's own modules.
        ignored: how many samples a batch has that was given without counting, on ranks without the first
            stage; 0 where there is none, or where it does not say.
    """

    sizes: BatchSizes = field(default_factory=BatchSizes)
    arguments: list[dict[str, Tensor]] | None = None
    microbatches: Microbatches | None = None
    ignored: int = 0


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The arguments of a step, and what crosses borders in it.

    Attributes:
        arguments: for each microbatch the tensors among the first stage's arguments, by name; None on ranks
            without the first stage.
        samples: how many each microbatch has; empty where this rank does not know.
        routes: for each microbatch, with its sizes and dtypes; empty where all have those of the pipeline.
        changed: whether other values cross than in the step before, which is more than other sizes.
    """

    arguments: list[dict[str, Tensor]] | None
    samples: tuple[int, ...]
    routes: tuple[Routes, ...] = ()
    changed: bool = False


class StepPreparation(Protocol):
    """Prepares the steps of one rank."""

    def accept(self, arguments: StepArguments) -> Accepted:
        """Check what this rank is given. Waits for no other rank.

        Raises:
            MicrobatchError: a batch that can't be cut.
            SignatureMismatch: what the pipeline was not cut for.
        """
        ...

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """Find out what crosses. Collective; the sizes in ``accepted`` are those that all ranks know."""
        ...


class CapturedPreparation:
    """The `StepPreparation` of stages of a captured model, and of those that run the model's own code.

    Args:
        stages: those of this rank, by index.
        microbatches: how many a step has.
    """

    def __init__(self, stages: Mapping[int, Stage], comm: Comm, microbatches: int) -> None:
        self._stages = stages
        self._comm = comm
        self._microbatches = microbatches
        self._precision = Precision()

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`."""
        first, train = self._stages.get(0), arguments.train
        microbatches = arguments.microbatches  # refused on every rank alike
        if first is None:
            return Accepted(ignored=arguments.samples_here())
        if isinstance(first, BlockStage):
            batch = arguments.in_microbatches(first=True)
            sizes = BatchSizes(batch.samples, ((),) * len(batch.samples))
            return Accepted(sizes, [first.arguments(*part) for part in batch.parts])
        assert isinstance(first, GraphStage)
        if microbatches is None:
            tensors, sizes = arguments_of_batch(first, arguments.cut(first=True), train=train)
        else:
            tensors, sizes = arguments_of_microbatches(first, microbatches, train=train)
        return Accepted(sizes, tensors)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`. A rank whose own batch has another size has targets of that size too, which
        a loss may broadcast without a word.

        Raises:
            SignatureMismatch: this rank was given a batch of another size than the first stage's.
        """
        stage, sizes = next(iter(self._stages.values())), accepted.sizes
        comparable = bool(accepted.ignored and sizes.samples and all(sizes.samples))
        if comparable and accepted.ignored != sum(sizes.samples):
            raise SignatureMismatch(
                f"rank {self._comm.rank} was given a batch of {accepted.ignored} samples, but the rank of "
                f"the first stage one of {sum(sizes.samples)}: give all ranks the same batch, or give it "
                "to the first stage's rank alone, and targets of the same batch to the last stage's"
            )
        routes = stage.routes
        cast = self._precision.routes(self._comm, self._stages, routes, *sizes.open[:1])
        crossing: tuple[Routes, ...] = ()
        if routes.symbols:
            training = stage.module.training
            routes_of = {one: cast.at(one, training) for one in dict.fromkeys(sizes.open)}
            crossing = tuple(routes_of[one] for one in sizes.open)
        elif cast is not routes:
            crossing = (cast,) * self._microbatches
        for each in self._stages.values():
            each.crossing = crossing
        return PreparedStep(accepted.arguments, sizes.samples, crossing)
