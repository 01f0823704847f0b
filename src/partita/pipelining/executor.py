"""Runs one rank's part of a schedule: compute in the order that the schedule says, receives posted ahead,
sends that never wait.

Indices as in the papers: ``stage`` of the model, ``microbatch`` of the batch, ``rank`` of the process. One
step is::

    for each action of this rank:   F  take inputs, run, hand on        RECV_*  make room, start receiving
                                    B  take gradients, run, hand back   SEND_*  start sending
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.errors import ExecutionError, PartitaError
from partita.pipelining.mailbox import Mailbox
from partita.pipelining.stage import PipelineStage, detached
from partita.planning import Action, ActionKind, Schedule
from partita.runtime import NULL_TRACER, Comm, RandomKey, Recorder, keyed

__all__ = ["Executor", "StepInputs", "StepResults"]


@dataclass(frozen=True)
class StepInputs:
    """What one step is given, cut into microbatches.

    Attributes:
        arguments: for each microbatch the tensors among the model's inputs, by name; None on ranks without
            the first stage.
        targets: for each microbatch; None where there are none.
        weights: what each microbatch's loss counts for.
        seed: of the random numbers.
        number: which step it is; random numbers differ from step to step.
    """

    arguments: Sequence[Mapping[str, Tensor]] | None
    targets: Sequence[Any] | None
    weights: tuple[float, ...]
    seed: int
    number: int


@dataclass(frozen=True)
class StepResults:
    """What one step returns, in order of the microbatches; empty on ranks without the last stage.

    Attributes:
        outputs: what the model returns, without history.
        losses: 0-d tensors; in evaluation only where there is something to compare with.
    """

    outputs: list[Any]
    losses: list[Tensor]


class Executor:
    """One rank of a pipeline.

    Args:
        schedule: with sends and receives written out.
        stages: those of this rank, by index.
        loss_fn: from (output, target) to a 0-d tensor; None to run forward only.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        comm: Comm,
        loss_fn: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        self.schedule = schedule
        self.stages = dict(stages)
        self.comm = comm
        self.loss_fn = loss_fn
        self.train = schedule.has_backward
        self.program = _receives_first(schedule.actions(comm.rank))
        unknown = {action.kind for action in self.program} - _RUNS
        if unknown:
            raise ExecutionError(
                f"schedule {schedule.name!r} has {', '.join(sorted(unknown))}, which this executor does not "
                "run: use GPipe or 1F1B"
            )

    def run(self, inputs: StepInputs, tracer: Recorder = NULL_TRACER) -> StepResults:
        """Run one step.

        Raises:
            BaseException: whatever went wrong here is published to the other ranks first.
        """
        step = _Step(self, inputs, tracer)
        action: Action | None = None
        try:
            for action in self.program:
                with tracer.span(
                    str(action), _category(action), stage=action.stage, microbatch=action.microbatch
                ):
                    step.do(action)
            step.mail.finish()
        except BaseException as error:
            for stage in self.stages.values():
                stage.forget()
            where = _where(action)
            self.comm.fail(error, where)
            if not isinstance(error, PartitaError):
                error.add_note(f"(rank {self.comm.rank}, {where})")
            raise
        return step.results()


class _Step:
    """One run of the program."""

    def __init__(self, executor: Executor, inputs: StepInputs, tracer: Recorder) -> None:
        routes = next(iter(executor.stages.values())).routes
        self.mail = Mailbox(executor.schedule, routes, executor.stages, executor.comm)
        self._outputs: dict[int, Any] = {}
        self._losses: dict[int, Tensor] = {}
        self._roots: dict[int, tuple[Tensor, Tensor]] = {}
        self._stages = executor.stages
        self._train = executor.train
        self._loss_fn = executor.loss_fn
        self._inputs = inputs
        self._tracer = tracer

    def results(self) -> StepResults:
        """Everything, once the program has run."""
        return StepResults(
            [self._outputs[number] for number in sorted(self._outputs)],
            [self._losses[number] for number in sorted(self._losses)],
        )

    def do(self, action: Action) -> None:
        """Run one action."""
        microbatch = action.microbatch
        assert microbatch is not None
        if action.kind is ActionKind.F:
            self._forward(self._stages[action.stage], microbatch)
        elif action.kind is ActionKind.B:
            self._backward(self._stages[action.stage], microbatch)
        elif action.is_receive:
            self.mail.receive(action, microbatch)
        else:
            self.mail.send(action, microbatch)

    def _forward(self, stage: PipelineStage, microbatch: int) -> None:
        values = self.mail.take(ActionKind.F, stage.index, microbatch, self._tracer)
        if stage.is_first:
            assert self._inputs.arguments is not None
            values |= self._inputs.arguments[microbatch]
        key = RandomKey(self._inputs.seed, self._inputs.number, microbatch)
        with torch.set_grad_enabled(self._train):
            with keyed(key):
                made = values | stage.forward(microbatch, values, train=self._train)
            if stage.is_last:
                self._finish(stage, microbatch, made)
        self.mail.put(ActionKind.F, stage.index, microbatch, made)

    def _backward(self, stage: PipelineStage, microbatch: int) -> None:
        gradients = self.mail.take(ActionKind.B, stage.index, microbatch, self._tracer)
        loss = self._roots.pop(microbatch) if stage.is_last else None
        results = stage.backward(microbatch, gradients, loss)
        self.mail.put(ActionKind.B, stage.index, microbatch, results)

    def _finish(self, last: PipelineStage, microbatch: int, made: Mapping[str, Tensor]) -> None:
        """The model's result, and its loss, for one microbatch."""
        output = last.assemble(made)
        self._outputs[microbatch] = detached(output)
        targets = self._inputs.targets
        if self._loss_fn is None or not (self._train or targets):
            return
        loss = _checked(self._loss_fn(output, targets[microbatch] if targets else None))
        self._losses[microbatch] = loss.detach()
        if self._train:
            self._roots[microbatch] = (loss, torch.full_like(loss, self._inputs.weights[microbatch]))


_RUNS = {
    ActionKind.F,
    ActionKind.B,
    ActionKind.SEND_F,
    ActionKind.RECV_F,
    ActionKind.SEND_B,
    ActionKind.RECV_B,
}


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ExecutionError(f"loss_fn returns {type(loss).__name__}: return a tensor of one number")
    if loss.dim() != 0:
        raise ExecutionError(
            f"loss_fn returns a tensor of shape {list(loss.shape)}: return one number, such as its mean()"
        )
    return loss


def _receives_first(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Post each receive one compute action earlier, so that its message travels while that action runs."""
    program: list[Action] = []
    for action in actions:
        at = len(program)
        if action.is_receive:
            while at and program[at - 1].is_send:
                at -= 1
            if at and program[at - 1].is_compute:
                at -= 1
        program.insert(at, action)
    return tuple(program)


def _where(action: Action | None) -> str:
    if action is None:
        return "a step"
    return f"stage {action.stage}, microbatch {action.microbatch}, action {action}"


def _category(action: Action) -> str:
    return "compute" if action.is_compute else "comm"
