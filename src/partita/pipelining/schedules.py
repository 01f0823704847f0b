"""The schedules that users call: ``ScheduleGPipe(stage, n_microbatches, loss_fn).step(x, target=y)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from partita.errors import ExecutionError, ScheduleError
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

    Making one is collective: all ranks do it, with stages of the same cut.

    Args:
        stages: the stage of this rank, or all of its stages.
        n_microbatches: into how many the batch is cut.
        loss_fn: from (output, target) to a 0-d tensor; needed by `step`.
        args_chunk_spec: how positional arguments are cut; along dim 0 if not given.
        kwargs_chunk_spec: how keyword arguments are cut.
        output_merge_spec: how the microbatches' outputs are merged; along dim 0 if not given.
        scale_grads: the losses' gradients are weighted with each microbatch's share of the batch, so that
            they add up to the gradient of the mean; without it they are summed.
        seed: of the random numbers, which depend on (seed, step, microbatch, call site) alone.
        tracer: records what runs when; may be replaced between two steps.

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
        held = [stages] if isinstance(stages, PipelineStage) else list(stages)
        self._check(held, n_microbatches)
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
        self._owns_comm = held[0].comm is None
        self.comm: Comm = held[0].comm or ProcessGroupComm.from_group()
        self.stage_ranks = self._agree(held)
        self._peers = neighbours(self.comm.rank, self.routes, self.stage_ranks)
        pairs = {(self.stage_ranks[a], self.stage_ranks[b]) for a, b in self.routes.edges}
        self.comm.connect({pair for a, b in sorted(pairs) if a != b for pair in ((a, b), (b, a))})
        self._executors: dict[bool, Executor] = {}
        self._steps = 0

    def schedule(self, *, train: bool = True) -> Schedule:
        """What every rank does in one step, sends and receives included."""
        return self._executor(train).schedule

    def state_dict(self) -> dict[str, int]:
        """How many steps have been made: random numbers depend on it, so a resumed training needs it."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting where ``state`` stopped."""
        self._steps = state["steps"]

    def close(self) -> None:
        """Leave the pipeline: closes the communicator where the schedule made it. Done at exit if not
        called.
        """
        if self._owns_comm:
            self.comm.close()

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward and backward of one batch; gradients are added to ``.grad``. Collective.

        Args:
            args: the model's arguments, on the rank that holds the first stage; ignored elsewhere.
            target: what ``loss_fn`` compares with, on the rank that holds the last stage.
            losses: gets the loss of each microbatch, on the rank that holds the last stage.
            kwargs: the model's keyword arguments, where ``args`` are.

        Returns:
            The merged output on the rank that holds the last stage, None elsewhere.

        Raises:
            ExecutionError: no ``loss_fn``, or one that does not return a 0-d tensor.
            MicrobatchError: a batch that can't be cut.
            SignatureMismatch: shapes that the pipeline was not cut for, or ranks that are about to do
                different things.
            PeerFailed: another rank failed.
        """
        return self._run(args, kwargs, target, losses, train=True)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward of one batch without gradients; touches no ``.grad``. Collective. Arguments are those of
        `step`.

        Modules stay in the mode that they are in: call ``stage.module.eval()`` first where that matters.
        ``losses`` is filled where there are a ``loss_fn`` and a ``target``.
        """
        with torch.no_grad():
            return self._run(args, kwargs, target, losses, train=False)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Tensor] | None,
        *,
        train: bool,
    ) -> Any:
        try:
            if train and self.loss_fn is None:
                raise ExecutionError(
                    "step() needs a loss: pass loss_fn to the schedule, or call eval() to run forward only"
                )
            inputs = self._cut(args, kwargs, target, train)
            agree_on_step(self.comm, self._peers, self._announcement(train))
            executor = self._executor(train)
        except BaseException as error:
            self.comm.fail(error, "preparing a step")
            raise
        results = executor.run(inputs, self.tracer)
        if train:
            self._share_gradients()
            self._steps += 1
        if losses is not None:
            losses[:] = results.losses
        return merge(results.outputs, self.output_merge_spec) if results.outputs else None

    def _share_gradients(self) -> None:
        try:
            share_gradients(self.comm, self.stages, self.stage_ranks, self.routes)
        except BaseException as error:
            self.comm.fail(error, "sharing the gradients of tied parameters")
            raise

    def _announcement(self, train: bool) -> str:
        """What the others must be about to do too."""
        modes = {stage.module.training for stage in self.stages.values()}
        mode = "both modes" if len(modes) > 1 else "train mode" if modes.pop() else "eval mode"
        return f"{'step' if train else 'eval'}() number {self._steps} in {mode}"

    def _executor(self, train: bool) -> Executor:
        if train not in self._executors:
            kind = get_schedule(self.kind if train else "ForwardOnly")
            plain = kind.generate(  # type: ignore[call-arg]
                len(self.stage_ranks), self.n_microbatches, placement=self.stage_ranks
            )
            lowered = lower(plain, self.routes.edges)
            self._executors[train] = Executor(lowered, self.stages, self.comm, self.loss_fn)
        return self._executors[train]

    def _check(self, held: Sequence[PipelineStage], n_microbatches: int) -> None:
        if not self.kind:
            raise ScheduleError(
                "PipelineSchedule is the base of the schedules: use Schedule1F1B or ScheduleGPipe"
            )
        if not held:
            raise ScheduleError("a rank needs at least one stage: pass the stage that it built")
        if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ScheduleError(f"n_microbatches is {n_microbatches!r}: give a whole number of at least 1")

    def _agree(self, held: Sequence[PipelineStage]) -> tuple[int, ...]:
        settings = {
            "the schedule": self.kind,
            "n_microbatches": self.n_microbatches,
            "seed": self.seed,
            "scale_grads": self.scale_grads,
        }
        try:
            return agree_on_placement(self.comm, held, settings)
        except Exception as error:
            self.comm.fail(error, "agreeing on the stages")
            raise

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, train: bool) -> StepInputs:
        """Arguments and targets in microbatches, on the ranks that have them."""
        count = self.n_microbatches
        arguments, targets, weights = None, None, (1.0 / count,) * count
        first = self.stages.get(0)
        if first is not None:
            specs = (self.args_chunk_spec, self.kwargs_chunk_spec)
            weights = plan_microbatches(args, kwargs, count, *specs).weights
            arguments = [
                first.accept(first.signature.flatten(*part), microbatch, train=train)
                for microbatch, part in enumerate(split_args(args, kwargs, count, *specs))
            ]
        if target is not None and self.routes.stages - 1 in self.stages:
            targets = [part[0][0] for part in split_args((target,), None, count)]
            weights = plan_microbatches((target,), None, count).weights
        if not self.scale_grads:
            weights = (1.0,) * count
        return StepInputs(arguments, targets, weights, self.seed, self._steps)


class ScheduleGPipe(PipelineSchedule):
    """All forward passes, then all backward passes (Huang et al. 2019, "GPipe")."""

    kind = "GPipe"


class Schedule1F1B(PipelineSchedule):
    """As soon as a microbatch can go back, it does, so that few are in flight (Narayanan et al. 2020,
    PipeDream-Flush).
    """

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
        known = ", ".join(kind.kind for kind in classes.values())
        raise ScheduleError(f"there is no schedule class {name!r}: choose one of {known}")
    return classes[wanted]
