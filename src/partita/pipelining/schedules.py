"""The schedules that users call: ``ScheduleGPipe(stage, n_microbatches, loss_fn).step(x, target=y)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from partita.errors import ExecutionError, MicrobatchError, ScheduleError
from partita.pipelining.agreement import agree_on_placement, agree_on_step, neighbours
from partita.pipelining.executor import Executor, StepInputs
from partita.pipelining.stage import PipelineStage
from partita.pipelining.tied import share_gradients
from partita.planning import Schedule, get_schedule, lower
from partita.runtime import (
    NULL_TRACER,
    Comm,
    ProcessGroupComm,
    Recorder,
    merge,
    plan_microbatches,
    split_args,
)

__all__ = ["PipelineSchedule", "Schedule1F1B", "ScheduleGPipe", "get_schedule_class"]


class PipelineSchedule:
    """Runs this rank's stages. `Schedule1F1B` and `ScheduleGPipe` are the ones to use.

    Making one is collective: all ranks do it, with stages of the same `Pipe`.

    Args:
        stages: the stage of this rank, or all of its stages.
        n_microbatches: into how many the batch is cut.
        loss_fn: from (output, target) to one number; needed by `step`.
        args_chunk_spec: how positional arguments are cut; along dim 0 if not given.
        kwargs_chunk_spec: how keyword arguments are cut.
        output_merge_spec: how the microbatches' outputs are merged; along dim 0 if not given.
        scale_grads: the losses' gradients are weighted with each microbatch's share of the batch, so that they add up to the
            gradient of the mean; without it they are summed.
        seed: of the random numbers, which depend on (seed, step, microbatch, call site) alone.
        tracer: records what runs when.

    Raises:
        SignatureMismatch: the ranks do not agree on stages, schedule or microbatches.
    """

    kind: ClassVar[str] = ""

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        seed: int = 0,
        tracer: Recorder = NULL_TRACER,
    ) -> None:
        if not self.kind:
            raise ScheduleError("PipelineSchedule is the base of the schedules: use Schedule1F1B or ScheduleGPipe")
        held = [stages] if isinstance(stages, PipelineStage) else list(stages)
        if not held:
            raise ScheduleError("a rank needs at least one stage: pass the stage that it built")
        self.stages = {stage.index: stage for stage in held}
        self.n_microbatches = n_microbatches
        self.loss_fn = loss_fn
        self.args_chunk_spec = args_chunk_spec
        self.kwargs_chunk_spec = kwargs_chunk_spec
        self.output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self.seed = seed
        self.tracer = tracer
        self.routes = held[0].routes
        self.comm: Comm = held[0].comm or ProcessGroupComm.from_group()
        settings = {"the schedule": self.kind, "n_microbatches": n_microbatches, "seed": seed, "scale_grads": scale_grads}
        try:
            self.stage_ranks = agree_on_placement(self.comm, held, settings)
        except Exception as error:
            self.comm.fail(error, "agreeing on the stages")
            raise
        self._peers = neighbours(self.comm, self.routes, self.stage_ranks)
        self._pairs = [(self.stage_ranks[a], self.stage_ranks[b]) for a, b in sorted(self.routes.edges)]
        self.comm.connect({pair for a, b in self._pairs if a != b for pair in ((a, b), (b, a))})
        self._schedules: dict[bool, Schedule] = {}
        self._steps = 0

    def schedule(self, *, train: bool = True) -> Schedule:
        """What every rank does in one step, sends and receives included."""
        if train not in self._schedules:
            kind = get_schedule(self.kind if train else "ForwardOnly")
            plain = kind.generate(len(self.stage_ranks), self.n_microbatches, placement=self.stage_ranks)  # type: ignore[call-arg]
            self._schedules[train] = lower(plain, self.routes.edges)
        return self._schedules[train]

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward and backward of one batch; gradients are added to ``.grad``. Collective.

        Args:
            args: the model's arguments, on the rank that holds the first stage; ignored elsewhere.
            target: what ``loss_fn`` compares with, on the rank that holds the last stage.
            losses: gets the loss of each microbatch, on the rank that holds the last stage.

        Returns:
            The merged output on the rank that holds the last stage, None elsewhere.

        Raises:
            ExecutionError: no ``loss_fn``.
            MicrobatchError: a batch that can't be cut.
            SignatureMismatch: shapes that the pipeline was not cut for, or ranks that are about to do different things.
            PeerFailed: another rank failed.
        """
        if self.loss_fn is None:
            raise ExecutionError("step() needs a loss: pass loss_fn to the schedule, or call eval() to run forward only")
        return self._run(args, kwargs, target, losses, train=True)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward of one batch without gradients; touches no ``.grad``. Collective. Arguments are those of `step`.

        ``losses`` is filled where there are a ``loss_fn`` and a ``target``.
        """
        with torch.no_grad():
            return self._run(args, kwargs, target, losses, train=False)

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, losses: list[Tensor] | None, *, train: bool
    ) -> Any:
        try:
            inputs = self._cut(args, kwargs, target)
            mode = {stage.module.training for stage in self.stages.values()}
            agree_on_step(self.comm, self._peers, f"{'step' if train else 'eval'} {self._steps} (modules in training mode: {mode})")
            executor = Executor(self.schedule(train=train), self.stages, self.comm, self.loss_fn, self.tracer)
        except BaseException as error:
            self.comm.fail(error, "preparing a step")
            raise
        outputs, step_losses = executor.run(inputs, seed=self.seed, number=self._steps)
        if train:
            share_gradients(self.comm, self.stages, self.stage_ranks, self.routes)
            self._steps += 1
        if not outputs:
            return None
        if losses is not None:
            losses.clear()
            losses.extend(step_losses)
        return merge(outputs, self.output_merge_spec)

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> StepInputs:
        """Arguments and targets in microbatches, on the ranks that have them."""
        count = self.n_microbatches
        arguments, weights = None, (1.0 / count,) * count
        first = self.stages.get(0)
        if first is not None:
            parts = split_args(args, kwargs, count, self.args_chunk_spec, self.kwargs_chunk_spec)
            weights = plan_microbatches(args, kwargs, count, self.args_chunk_spec, self.kwargs_chunk_spec).weights
            arguments = [
                first.accept(first.signature.flatten(*part), microbatch) for microbatch, part in enumerate(parts)
            ]
        targets = None
        if target is not None and self.routes.stages - 1 in self.stages:
            targets = [part[0][0] for part in split_args((target,), None, count)]
            weights = plan_microbatches((target,), None, count).weights
        if len(weights) != count:
            raise MicrobatchError(f"the batch makes {len(weights)} microbatches, the schedule wants {count}")
        return StepInputs(arguments, targets, weights if self.scale_grads else (1.0,) * count)


class ScheduleGPipe(PipelineSchedule):
    """All forward passes, then all backward passes (Huang et al. 2019, "GPipe")."""

    kind = "GPipe"


class Schedule1F1B(PipelineSchedule):
    """As soon as a microbatch can go back, it does, so that few are in flight (Narayanan et al. 2020, PipeDream-Flush)."""

    kind = "1F1B"


def get_schedule_class(name: str) -> type[PipelineSchedule]:
    """The schedule class of that name; capital and small letters are the same.

    Raises:
        ScheduleError: there is none.

    >>> get_schedule_class("gpipe").__name__
    'ScheduleGPipe'
    """
    classes = {kind.kind.lower(): kind for kind in (ScheduleGPipe, Schedule1F1B)}
    wanted = name.lower().removeprefix("schedule")
    if wanted not in classes:
        raise ScheduleError(f"there is no schedule class {name!r}: choose one of {', '.join(kind.kind for kind in classes.values())}")
    return classes[wanted]
