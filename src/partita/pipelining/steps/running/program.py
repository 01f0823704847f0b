"""Compiles one rank's part of a schedule into instructions, once; every step replays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from partita.pipelining.interface.routes import TRAILER, Routes
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.running.custom_functions import CustomAction, CustomFunction
from partita.pipelining.steps.running.instructions import (
    Backward,
    Forward,
    Instruction,
    Receive,
    Send,
    StageCall,
    WeightBackward,
)
from partita.pipelining.steps.running.mailbox import Delivery, Inbox, Outbox
from partita.pipelining.steps.running.step import StepResults, StepState
from partita.planning import Action, ActionKind, Schedule, send_ends
from partita.planning.simulating.messages import RECEIVED_AHEAD
from partita.runtime import Comm, wait_all

__all__ = ["AHEAD", "Program", "receives_ahead"]

AHEAD = RECEIVED_AHEAD
"""How many compute actions ahead of the one that needs its message a receive is posted. Each costs the memory
of a message."""

_PASS = {
    ActionKind.F: "F",
    ActionKind.B: "G",
    ActionKind.I: "G",
    ActionKind.SEND_F: "F",
    ActionKind.RECV_F: "F",
    ActionKind.SEND_B: "G",
    ActionKind.RECV_B: "G",
}
"""What an action moves: values (F) or gradients (G)."""


class Program:
    """The instructions of one rank.

    Args:
        schedule: with sends and receives written out.
        stages: those of this rank, by index.
        loss_fn: from (output, target) to a 0-d tensor; None to run forward only.
        ahead: how far ahead receives are posted; see `receives_ahead`.
        functions: what takes the place of the actions of a kind.

    Attributes:
        instructions: in the order in which they run.
        step: the state that they share.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        comm: Comm,
        loss_fn: Callable[..., Tensor] | None,
        ahead: int = AHEAD,
        functions: Mapping[ActionKind, CustomFunction] | None = None,
    ) -> None:
        self.step = StepState(stages)
        self._schedule = schedule
        self._stages = stages
        self._comm = comm
        self._loss_fn = loss_fn
        self._functions = functions or {}
        self._routes: Routes = next(iter(stages.values())).routes
        self._inboxes: dict[tuple[str, int, int], Inbox] = {}
        self._outboxes: dict[tuple[str, int, int, int], Outbox] = {}
        actions = receives_ahead(schedule.actions(comm.rank), ahead)
        self.instructions: list[Instruction] = []
        self._sends: list[Send] = []
        self._compile(actions)

    def finish(self) -> StepResults:
        """Wait until everything that was sent has left, and return the results of the step."""
        wait_all([handle for send in self._sends for handle in send.handles])
        for send in self._sends:
            send.clear()
        self._comm.synchronize()
        return self.step.finish()

    def clear(self) -> None:
        """Drop everything that is under way, after a failure."""
        self.step.clear()
        for send in self._sends:
            send.clear()
        for inbox in self._inboxes.values():
            inbox.clear()
        for outbox in self._outboxes.values():
            outbox.clear()
        for stage in self._stages.values():
            stage.forget()

    def _compile(self, actions: Sequence[Action]) -> None:
        links = {**self._routes.forward, **self._routes.backward}
        carried = {pair for pair, names in links.items() if names}
        ends = send_ends(self._schedule, self._routes.edges, links=carried)[self._comm.rank]
        sends: dict[Action, Send] = {}

        def ended(by_send: Mapping[Action, Sequence[Action]], send: Action) -> tuple[Send, ...]:
            return tuple(sends[earlier] for earlier in by_send.get(send, ()) if earlier in sends)

        for action in actions:
            function = self._functions.get(action.kind)
            if function is not None:
                self.instructions.append(self._custom(action, function))
                continue
            for part in action.parts or (action,):
                instruction = self._instruction(part)
                if instruction is None:
                    continue
                self.instructions.append(instruction)
                if isinstance(instruction, Send):
                    instruction.answered = ended(ends.answered, part)
                    instruction.unanswered = ended(ends.unanswered, part)
                    sends[part] = instruction
        self._sends = list(sends.values())

    def _custom(self, action: Action, function: CustomFunction) -> CustomAction:
        own: dict[Action, Instruction] = {}
        for part in action.parts or (action,):
            instruction = self._instruction(part)
            assert instruction is not None  # it is no send or receive
            own[part] = instruction
        return CustomAction(action, function, own, self.step)

    def _instruction(self, action: Action) -> Instruction | None:
        """The instruction of an action; None for a message without values."""
        stage, microbatch = self._stages[action.stage], action.microbatch
        if microbatch is None:
            return StageCall(action, stage)
        if action.is_communication:
            return self._message(action, microbatch)
        if action.kind is ActionKind.W:
            return WeightBackward(action, microbatch, stage, self.step)
        which = _PASS[action.kind]
        inbox = self._inbox(which, action.stage, microbatch)
        delivery = self._delivery(which, action.stage, microbatch)
        if action.kind is ActionKind.F:
            train = self._schedule.has_backward
            return Forward(action, microbatch, stage, self.step, inbox, delivery, self._loss_fn, train)
        backward = stage.backward if action.kind is ActionKind.B else stage.backward_input
        return Backward(action, microbatch, backward, self.step, inbox, delivery)

    def _message(self, action: Action, microbatch: int) -> Instruction | None:
        which, stage, other = _PASS[action.kind], action.stage, action.other_stage
        pair = (stage, other) if action.is_send else (other, stage)
        names = self._links(which).get(pair, ())
        if not names:
            return None
        rank = self._schedule.stage_ranks[other]
        values = [(self._routes.values[name], self._tag(name, pair, microbatch)) for name in names]
        trailer_tag = self._tag(TRAILER, pair, microbatch)
        message = action, microbatch, self.step, self._comm, rank, values, trailer_tag
        if action.is_send:
            return Send(*message, self._outbox(which, stage, other, microbatch))
        return Receive(*message, self._inbox(which, stage, microbatch))

    def _delivery(self, which: str, stage: int, microbatch: int) -> Delivery:
        targets: dict[str, tuple[list[Inbox], list[Outbox]]] = {}
        for (start, to), names in self._links(which).items():
            if start != stage:
                continue
            for name in names:
                inboxes, outboxes = targets.setdefault(name, ([], []))
                if to in self._stages:
                    inboxes.append(self._inbox(which, to, microbatch))
                else:
                    outboxes.append(self._outbox(which, stage, to, microbatch))
        return Delivery(targets)

    def _inbox(self, which: str, stage: int, microbatch: int) -> Inbox:
        return self._inboxes.setdefault((which, stage, microbatch), Inbox())

    def _outbox(self, which: str, stage: int, to: int, microbatch: int) -> Outbox:
        return self._outboxes.setdefault((which, stage, to, microbatch), {})

    def _links(self, which: str) -> Mapping[tuple[int, int], tuple[str, ...]]:
        return self._routes.forward if which == "F" else self._routes.backward

    def _tag(self, name: str, pair: tuple[int, int], microbatch: int) -> int:
        # 0 is taken by the agreement before a step.
        return 1 + self._routes.tags[name, *pair] * self._schedule.microbatches + microbatch


def receives_ahead(actions: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Post each receive up to ``ahead`` compute actions before the one that needs it, so that its message
    travels meanwhile. Receives keep their order::

        1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2   ->   1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2      (ahead 1)
    """
    if not ahead:
        return tuple(actions)
    program: list[Action] = []
    for action in actions:
        at = len(program)
        if action.is_receive:
            left = ahead
            while at and not program[at - 1].is_receive and (left or not program[at - 1].is_compute):
                left -= program[at - 1].is_compute
                at -= 1
        program.insert(at, action)
    return tuple(program)
