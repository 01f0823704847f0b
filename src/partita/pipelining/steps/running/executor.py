"""Runs one rank's part of a schedule: compute in the schedule's order, receives posted ahead, and sends that
do not wait.

Indices as in the papers: ``stage`` of the model, ``microbatch`` of the batch, ``rank`` of the process. One
step is::

    for each action of this rank:   F  take inputs, run, hand on          RECV_*  allocate, start receiving
                                    B  take gradients, run, hand back     SEND_*  start sending
                                    I  the same without gradients of weights, which are left to W
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from partita._torch.autograd.profiling import is_profiling, profiler_range
from partita.errors import PartitaError
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.running.custom_functions import CustomFunction
from partita.pipelining.steps.running.instructions import Instruction
from partita.pipelining.steps.running.program import AHEAD, Program
from partita.pipelining.steps.running.step import StepInputs, StepResults
from partita.planning import Action, ActionKind, Schedule
from partita.runtime import NULL_TRACER, Comm, NullTracer, Recorder

__all__ = ["Executor", "StepInputs", "StepResults"]


class Executor:
    """One rank of a pipeline.

    Args:
        schedule: with sends and receives written out.
        stages: those of this rank, by index.
        loss_fn: from (output, target) to a 0-d tensor; None to run forward only.
        defer_receives: post none ahead.
        functions: what takes the place of the actions of a kind.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        comm: Comm,
        loss_fn: Callable[..., Tensor] | None,
        *,
        defer_receives: bool = False,
        functions: Mapping[ActionKind, CustomFunction] | None = None,
    ) -> None:
        self.schedule = schedule
        self.comm = comm
        self.train = schedule.has_backward
        self._stages = tuple(stages.values())
        self._processes: tuple[int, ...] = getattr(comm, "processes", ())
        passes = [part for rank, part in schedule.passes() if rank == comm.rank]
        self._kinds = {
            stage.index: frozenset(part.kind for part in passes if part.stage == stage.index)
            for stage in self._stages
        }
        ahead = 0 if defer_receives else AHEAD
        self._program = Program(schedule, dict(stages), comm, loss_fn, ahead, functions)

    def run(self, inputs: StepInputs, tracer: Recorder = NULL_TRACER) -> StepResults:
        """Run one step. Under torch's profiler each action is a range with a name for people.

        Raises:
            BaseException: any error here, once it has been published to the other ranks.
        """
        step = self._program.step
        instruction: Instruction | None = None
        try:
            step.begin(inputs)
            for stage in self._stages:
                stage.run_among(self._processes)
                if self.train:
                    stage.begin(self.schedule.microbatches)
            with torch.set_grad_enabled(self.train):
                for stage in self._stages:
                    arguments = inputs.arguments[0] if inputs.arguments and stage.is_first else {}
                    stage.compile_ahead(arguments, self._kinds[stage.index])
                if isinstance(tracer, NullTracer) and not is_profiling():
                    for instruction in self._program.instructions:
                        instruction.run()
                else:
                    with profiler_range(self._title(inputs.number), wanted=is_profiling()):
                        for instruction in self._program.instructions:
                            _run_watched(instruction, tracer)
                instruction = None
                return self._program.finish()
        except BaseException as error:
            self._program.clear()
            where = _where(instruction.action if instruction is not None else None)
            self.comm.fail(error, where)
            if not isinstance(error, PartitaError):
                error.add_note(f"(rank {self.comm.rank}, {where})")
            raise

    def _title(self, step: int) -> str:
        what = "step" if self.train else "evaluation"
        return f"pipeline {what} {step}, {self.schedule.name}, rank {self.comm.rank}"


def _run_watched(instruction: Instruction, tracer: Recorder) -> None:
    """Run it for a tracer, a profiler or both; what it waits for is a range of its own."""
    action, inbox, profiled = instruction.action, instruction.inbox, is_profiling()
    category = "compute" if action.is_compute else "comm"
    about = {"stage": action.stage, "microbatch": action.microbatch}
    words = action.words if profiled else ""
    with tracer.span(str(action), category, **about), profiler_range(words, wanted=profiled):
        if inbox is not None and inbox.handles:
            waiting = profiler_range(f"wait for what {words} takes", wanted=profiled)
            with tracer.span(f"wait {action}", "wait", **about), waiting:
                inbox.wait()
        instruction.run()


def _where(action: Action | None) -> str:
    if action is None:
        return "a step"
    return f"stage {action.stage}, microbatch {action.microbatch}, action {action}"
