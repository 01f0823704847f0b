"""What each action of a schedule waits for and makes: run by the validator, `lower` and the simulator.

A key stands for one thing that can be waited for:

    ("F", stage, stage, microbatch)        the forward pass is computed
    ("G", stage, stage, microbatch)        the gradient of its inputs is computed
    ("F>", producer, consumer, microbatch) the message with the forward value was sent (simulator: has
    arrived) ("G>", consumer, producer, microbatch) likewise with the gradient ("F<", ...), ("G<", ...)
    that message was received (in a schedule with communication written out)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.edges import EdgeTable
from partita.planning.schedules.schedule import Schedule

__all__ = [
    "Key",
    "PassKeys",
    "PlannedStep",
    "compile_steps",
    "describe_key",
    "message_of",
    "pass_keys",
    "run",
    "step_compiler",
]

Key = tuple[str, int, int, int]
OpenKey = tuple[str, int, int]
"""A key without its microbatch."""


class PassKeys(NamedTuple):
    """What a pass of a stage waits for, makes and sends off, whatever its microbatch."""

    needs: tuple[OpenKey, ...]
    gives: tuple[OpenKey, ...]
    sends: tuple[OpenKey, ...]


class PlannedStep(NamedTuple):
    """One action, the keys that it waits for, the keys that it makes and the messages that it sends off."""

    action: Action
    needs: tuple[Key, ...]
    gives: tuple[Key, ...]
    sends: tuple[Key, ...]


def message_of(action: Action) -> Key:
    """The key of the message that a send or a receive is about."""
    microbatch = action.microbatch or 0
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    sender, receiver = (
        (action.stage, action.other_stage) if action.is_send else (action.other_stage, action.stage)
    )
    return ("F>" if forward else "G>", sender, receiver, microbatch)


def describe_key(key: Key) -> str:
    """What a key stands for, in words."""
    what, stage, other, microbatch = key
    if what == "F":
        return f"{stage}F{microbatch}"
    if what == "G":
        return f"{stage}B{microbatch} (or I)"
    send = "SEND_F" if what[0] == "F" else "SEND_B"
    receive = "RECV_F" if what[0] == "F" else "RECV_B"
    if what[1] == ">":
        return f"{stage}{send}{microbatch} to stage {other}"
    return f"{other}{receive}{microbatch} from stage {stage}"


def compile_steps(
    schedule: Schedule, table: EdgeTable, *, lowered: bool | None = None, blocking: bool = True
) -> list[list[PlannedStep]]:
    """One list of steps a rank.

    Args:
        schedule: its actions must be on their own ranks.
        table: which stage feeds which.
        lowered: whether messages are sent by actions of their own, rather than by the pass that makes the
            value; found from the schedule where it is not given.
        blocking: whether a receive waits for its message, rather than leaving that to the pass that takes the
            value.
    """
    step = step_compiler(schedule, table, lowered=lowered, blocking=blocking)
    return [[step(action) for action in row if action is not None] for row in schedule.rows]


def step_compiler(
    schedule: Schedule, table: EdgeTable, *, lowered: bool | None = None, blocking: bool = True
) -> Callable[[Action], PlannedStep]:
    """What makes a step of an action; `compile_steps` says what the arguments are."""
    return _Compiler(schedule, table, schedule.is_lowered if lowered is None else lowered, blocking).step


def pass_keys(
    schedule: Schedule, table: EdgeTable, gradients: EdgeTable | None = None
) -> Callable[[ActionKind, int], PassKeys]:
    """The keys of a kind of pass and a stage, where no receive waits for its message.

    Args:
        schedule: its actions must be on their own ranks.
        table: which stage feeds which.
        gradients: along which edges gradients go back, where that is not the same.
    """
    return _Compiler(schedule, table, schedule.is_lowered, blocking=False, gradients=gradients).keys


def run(
    programs: Sequence[Sequence[PlannedStep]],
    on_step: Callable[[int, int, PlannedStep], None] = lambda *_: None,
) -> list[int]:
    """Run without times, with sends that don't wait, as far as it goes.

    Args:
        on_step: called with rank, position and step, in an order in which they can be run.

    Returns:
        How many steps of each rank were run: all, where nothing stalls.
    """
    done: set[Key] = set()
    at = [0] * len(programs)
    waiting: dict[Key, list[int]] = {}
    runnable = deque(range(len(programs)))
    while runnable:
        rank = runnable.popleft()
        program = programs[rank]
        while at[rank] < len(program):
            step = program[at[rank]]
            missing = next((key for key in step.needs if key not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            on_step(rank, at[rank], step)
            at[rank] += 1
            for key in (*step.gives, *step.sends):
                done.add(key)
                runnable.extend(waiting.pop(key, ()))
    return at


class _Compiler:
    """Knows for each stage what its passes take and send; a step adds the microbatch."""

    def __init__(
        self,
        schedule: Schedule,
        table: EdgeTable,
        lowered: bool,
        blocking: bool,
        gradients: EdgeTable | None = None,
    ) -> None:
        back = table if gradients is None else gradients
        self._rank = schedule.stage_ranks
        self._lowered = lowered
        self._blocking = blocking
        self._arrival = "<" if lowered and blocking else ">"
        stages = range(schedule.stages)
        self._forward_needs = [self._inputs("F", stage, table.producers[stage]) for stage in stages]
        self._backward_needs = [
            (("F", stage, stage), *self._inputs("G", stage, back.consumers[stage])) for stage in stages
        ]
        self._forward_sends = [self._outputs("F>", stage, table.consumers[stage]) for stage in stages]
        # The nearest stage needs its gradient first.
        self._backward_sends = [self._outputs("G>", stage, back.producers[stage][::-1]) for stage in stages]

    def step(self, action: Action) -> PlannedStep:
        if action.is_communication:
            return self._communication(action)
        needs: list[Key] = []
        gives: list[Key] = []
        sends: list[Key] = []
        for part in action.passes:
            keys, microbatch = self.keys(part.kind, part.stage), part.microbatch or 0
            for full, partly in zip((needs, gives, sends), keys, strict=True):
                full += [(what, source, target, microbatch) for what, source, target in partly]
        return PlannedStep(action, tuple(needs), tuple(gives), tuple(sends))

    def keys(self, kind: ActionKind, stage: int) -> PassKeys:
        if kind is ActionKind.W:
            return PassKeys((("G", stage, stage),), (), ())
        if kind is ActionKind.F:
            return PassKeys(self._forward_needs[stage], (("F", stage, stage),), self._forward_sends[stage])
        return PassKeys(self._backward_needs[stage], (("G", stage, stage),), self._backward_sends[stage])

    def _communication(self, action: Action) -> PlannedStep:
        message = message_of(action)
        what, stage, _, microbatch = message
        if action.is_send:
            return PlannedStep(action, ((what[0], stage, stage, microbatch),), (), (message,))
        if not self._blocking:
            return PlannedStep(action, (), (), ())
        return PlannedStep(action, (message,), ((what[0] + "<", *message[1:]),), ())

    def _inputs(self, what: str, stage: int, sources: tuple[int, ...]) -> tuple[OpenKey, ...]:
        here = self._rank[stage]
        return tuple(
            (what, source, source) if self._rank[source] == here else (what + self._arrival, source, stage)
            for source in sources
        )

    def _outputs(self, what: str, stage: int, targets: tuple[int, ...]) -> tuple[OpenKey, ...]:
        if self._lowered:
            return ()
        here = self._rank[stage]
        return tuple((what, stage, target) for target in targets if self._rank[target] != here)
