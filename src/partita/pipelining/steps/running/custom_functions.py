"""Functions that replace a kind of action, as torch's ``register_custom_function`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from partita.errors import ScheduleError
from partita.pipelining.steps.running.instructions import Instruction
from partita.pipelining.steps.running.mailbox import Inbox
from partita.pipelining.steps.running.step import StepState
from partita.planning import Action, ActionKind, Schedule, with_reduce_grad, with_unshard

__all__ = ["CustomAction", "CustomFunction", "PipelineContext", "checked_kind", "with_whole_stages"]

_GATHERS = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD})


def _outside(action: Action) -> None:
    raise ScheduleError(
        f"{action} can't be run outside of a step: ctx.run is for custom functions, while their action is due"
    )


@dataclass(frozen=True)
class PipelineContext:
    """What a custom function is given besides its action.

    Attributes:
        schedule_ref: the schedule that runs.
        arg_mbs: for each microbatch, the positional arguments that this rank's step was given.
        kwarg_mbs: for each microbatch, its keyword arguments.
        target_mbs: for each microbatch, its target; None where the step was given none.
        losses: the list that the step was given for its losses; filled when the step ends.
        run: does what the schedule itself does for the action, or for one of its parts. Each pass must be run
            once: nothing else makes what the next one needs.
    """

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None
    run: Callable[[Action], None] = _outside


class CustomFunction(Protocol):
    """Takes the place of each action of a kind."""

    def __call__(self, action: Action, ctx: PipelineContext) -> None: ...


def checked_kind(kind: Any) -> ActionKind:
    """The kind of action that a function is registered for, from an `ActionKind`, its text or torch's own.

    Raises:
        ScheduleError: sends and receives, and what is no kind.
    """
    kinds = [kind for kind in ActionKind if not kind.startswith(("SEND", "RECV"))]
    if kind not in kinds:
        raise ScheduleError(
            f"{str(kind)!r} can't have a custom function: register one for {', '.join(kinds)}"
        )
    return ActionKind(kind)


def with_whole_stages(schedule: Schedule, functions: Mapping[ActionKind, CustomFunction]) -> Schedule:
    """Add the actions on whole stages that ``functions`` are for, where the schedule has none of that kind.
    A schedule that has sends and receives is returned as it is.
    """
    if schedule.is_lowered:
        return schedule
    rows: tuple[tuple[Action | None, ...], ...] = schedule.rows
    present = {action.kind for row in rows for action in row if action is not None}
    if _GATHERS & functions.keys() and not _GATHERS & present:
        rows = tuple(with_unshard(row) for row in rows)
    if ActionKind.REDUCE_GRAD in functions.keys() - present:
        rows = tuple(with_reduce_grad(row, schedule.microbatches) for row in rows)
    return Schedule(schedule.name, schedule.stage_ranks, schedule.microbatches, rows)


@dataclass(slots=True, eq=False)
class CustomAction:
    """An action in whose place a function is called.

    Attributes:
        own: what the schedule itself does for the action, or for each of its parts.
    """

    action: Action
    function: CustomFunction
    own: Mapping[Action, Instruction]
    step: StepState
    inbox: Inbox | None = None

    def run(self) -> None:
        left = dict(self.own)

        def run(action: Action) -> None:
            for part in action.parts or (action,):
                if part not in left:
                    state = "has been run already" if part in self.own else "is not part of it"
                    raise ScheduleError(
                        f"the custom function for {self.action} runs {part}, which {state}: run each of its "
                        f"actions once ({', '.join(map(str, self.own))})"
                    )
                left.pop(part).run()

        context = self.step.inputs.context
        assert context is not None
        self.function(self.action, replace(context, run=run))
        missing = [action for action in left if action.is_compute]
        if missing:
            raise ScheduleError(
                f"the custom function for {self.action} returns without having run {missing[0]}: call "
                f"ctx.run(action) in it, or ctx.run(part) for each of action.parts"
            )
