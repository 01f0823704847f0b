"""What a training step took, on all ranks together, for whoever logs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partita.errors import ArgumentTypeError
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.runtime import BusyTime, NullTracer

__all__ = ["StepMeter", "StepMetrics", "log_to"]


@dataclass(frozen=True)
class StepMetrics:
    """One training step of the whole pipeline; the same on every rank.

    Attributes:
        step: its number, from 0.
        seconds: from the end of the step before, or from when the meter was made, to its end.
        losses: of the microbatches; empty where no rank gave them.
        grad_norm: as given; None where it was not.
        samples: of the batch, as given; None where it was not.
        tokens: of the batch, likewise.
        bubble: share of the ranks' time in the schedule's step that no pass used, from 0 to 1; None where
            the schedule has another tracer.
    """

    step: int
    seconds: float
    losses: tuple[float, ...] = ()
    grad_norm: float | None = None
    samples: int | None = None
    tokens: int | None = None
    bubble: float | None = None

    @property
    def loss(self) -> float | None:
        """The mean of the microbatches' losses."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def tokens_per_second(self) -> float | None:
        """None where nobody said how many tokens there are."""
        return None if self.tokens is None or not self.seconds else self.tokens / self.seconds

    @property
    def samples_per_second(self) -> float | None:
        """None where nobody said how many samples there are."""
        return None if self.samples is None or not self.seconds else self.samples / self.seconds

    def scalars(self, prefix: str = "train/") -> dict[str, float]:
        """The numbers that are there, by name.

        >>> StepMetrics(3, 0.5, losses=(2.0, 4.0), tokens=100).scalars("")
        {'loss': 3.0, 'tokens_per_second': 200.0, 'seconds': 0.5}
        """
        values = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "tokens_per_second": self.tokens_per_second,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
            "bubble": self.bubble,
        }
        return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}


class StepMeter:
    """Measures the steps of a training and gives each to ``on_step``.

    Args:
        schedule: whose steps are measured. Where it has no tracer, it gets one that adds up the time of
            passes, a few microseconds an action.
        on_step: are called with each step's metrics, on the ranks that give some; see `log_to`.

    >>> import torch
    >>> from partita.pipelining import Schedule1F1B, pipeline
    >>> from partita.pipelining.training import StepMeter
    >>> from partita.runtime import InProcessWorld
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> pipe = pipeline(model, (torch.ones(1, 4),), stages=2)
    >>> def train(comm):
    ...     schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2, lambda y, _: y.mean())
    ...     seen, losses = [], []
    ...     meter = StepMeter(schedule, seen.append)
    ...     schedule.step(torch.ones(2, 4), losses=losses)
    ...     meter.end_step(losses, samples=2)
    ...     return seen
    >>> (metrics,) = InProcessWorld(2).run(train)[0]
    >>> metrics.step, len(metrics.losses), metrics.samples, 0 <= metrics.bubble <= 1
    (0, 2, 2, True)
    """

    def __init__(self, schedule: PipelineSchedule, *on_step: Callable[[StepMetrics], None]) -> None:
        self._schedule = schedule
        self._on_step = on_step
        self._busy = BusyTime()
        if isinstance(schedule.tracer, NullTracer):
            schedule.tracer = self._busy
        self._began = time.monotonic()

    def end_step(
        self,
        losses: Sequence[Tensor] = (),
        *,
        grad_norm: Tensor | float | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> StepMetrics:
        """Measure the step that has just been made, its optimizer included. Collective.

        Each rank gives what it has; what others have given is taken from them, the first rank's first.

        Args:
            losses: as ``schedule.step`` has filled them, on the rank with the last stage.
            grad_norm: of all stages, as `clip_grad_norm_` returns it.
            samples: of the whole batch.
            tokens: of the whole batch.
        """
        own = (
            tuple(float(loss) for loss in losses),
            None if grad_norm is None else float(grad_norm),
            samples,
            tokens,
            self._busy.take() if self._schedule.tracer is self._busy else None,
        )
        now = time.monotonic()
        every = self._schedule.comm.all_gather_object(own)
        grad_norm, samples, tokens = (
            next((row[place] for row in every if row[place] is not None), None) for place in (1, 2, 3)
        )
        metrics = StepMetrics(
            self._schedule.state_dict()["steps"] - 1,
            now - self._began,
            next((row[0] for row in every if row[0]), ()),
            grad_norm,
            samples,
            tokens,
            _bubble([row[4] for row in every]),
        )
        self._began = now
        for function in self._on_step:
            function(metrics)
        return metrics


def log_to(logger: Any, prefix: str = "train/") -> Callable[[StepMetrics], None]:
    """Return a function that writes each step's scalars to a logger in the logger's own way.

    Args:
        logger: a TensorBoard ``SummaryWriter``, a run of Weights & Biases (``wandb.init()``), or a logger of
            Lightning.
        prefix: before each name.

    Raises:
        ArgumentTypeError: something else.
    """
    if callable(getattr(logger, "add_scalar", None)):

        def write(metrics: StepMetrics) -> None:
            for name, value in metrics.scalars(prefix).items():
                logger.add_scalar(name, value, metrics.step)

        return write
    for method in ("log_metrics", "log"):
        function = getattr(logger, method, None)
        if callable(function):
            return lambda metrics: function(metrics.scalars(prefix), step=metrics.step)
    raise ArgumentTypeError(
        f"a {type(logger).__name__} has no add_scalar, log_metrics or log: give a SummaryWriter, a run of "
        "wandb or a logger of Lightning, or write a function that takes StepMetrics"
    )


def _bubble(busy: Sequence[tuple[float, float] | None]) -> float | None:
    """From each rank's seconds in passes, and in the whole step."""
    measured = [pair for pair in busy if pair is not None]
    longest = max((whole for _, whole in measured), default=0.0)
    if len(measured) < len(busy) or not longest:
        return None
    return min(1.0, max(0.0, 1 - sum(passes for passes, _ in measured) / (len(measured) * longest)))
