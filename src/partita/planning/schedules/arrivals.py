"""From when on a rank knows, without asking, that what it sent has been received.

A rank hears of the others only in messages. Whoever sends one has done by then all that stands before it in
its row, and knew of others what it knew. So each rank keeps, of every other, how far it is known to be, and
passes that on with each message (vector clocks: Mattern 1989, "Virtual time and global states of distributed
systems")::

    rank 0   0F0  0SEND_F0  0F1  0SEND_F1 ...  0RECV_B0  0B0     here rank 0 knows that 0SEND_F0 has arrived
    rank 1             1RECV_F0  1F0  1B0  1SEND_B0

Memory of a message can be let go there; the wait for its end takes no time. Of a message that nobody answers
within the step (all of them, where only forward passes run) nothing is ever heard. Those are waited for when
many others have been sent after them, so that memory does not grow with the number of microbatches, as long
as the schedule comes to its end that way too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from partita.planning.schedules._program import Key, PlannedStep, compile_steps, message_of, run
from partita.planning.schedules.actions import Action
from partita.planning.schedules.edges import edge_table
from partita.planning.schedules.schedule import Schedule

__all__ = ["MOST_UNANSWERED", "SendEnds", "send_ends"]

MOST_UNANSWERED = 16
"""How many unanswered messages a rank holds on to."""


class SendEnds(NamedTuple):
    """For one rank, by send, the earlier sends to wait for before it.

    Attributes:
        answered: those that have been received for certain: to wait for them takes no time.
        unanswered: others, waited for so that memory does not grow.
    """

    answered: dict[Action, tuple[Action, ...]]
    unanswered: dict[Action, tuple[Action, ...]]


def send_ends(
    schedule: Schedule,
    edges: Iterable[tuple[int, int]] | None = None,
    *,
    most_unanswered: int = MOST_UNANSWERED,
    links: Collection[tuple[int, int]] | None = None,
) -> tuple[SendEnds, ...]:
    """The `SendEnds` of each rank. Sends that are left out are waited for at the end of the step.

    Args:
        schedule: valid, with sends and receives written out.
        edges: as in `lower`.
        most_unanswered: after how many unanswered sends to wait for the oldest.
        links: from which stage to which something is sent; None: along all edges, both ways. From a message
            of nothing (no gradients go back to a frozen stage) nothing is heard.

    >>> from partita.planning import get_schedule, lower
    >>> first, last = send_ends(lower(get_schedule("1F1B")(2, 4)))
    >>> {str(send): [str(end) for end in ends] for send, ends in first.answered.items()}
    {'0SEND_F2': ['0SEND_F0'], '0SEND_F3': ['0SEND_F1']}
    >>> {str(send): [str(end) for end in ends] for send, ends in last.answered.items()}
    {'1SEND_B2': ['1SEND_B0'], '1SEND_B3': ['1SEND_B1']}
    """
    table = edge_table(schedule.stages, edges)
    programs = compile_steps(schedule, table, lowered=True, blocking=False)
    clocks = _Clocks(programs, links)
    run(programs, clocks.step)
    answered, forced = [], []
    for program, answers in zip(programs, clocks.answers, strict=True):
        # A message of nothing is not sent, so nothing can be let go of at it.
        carrying = [
            step
            for step in program
            if links is None or not step.action.is_send or message_of(step.action)[1:3] in links
        ]
        answered.append(_at_next_send(carrying, answers))
        forced.append(_after_others(carrying, answers.keys(), most_unanswered))
    if not _ends(_waiting(programs, forced)):
        forced = [{} for _ in programs]
    return tuple(map(SendEnds, answered, forced))


def _at_next_send(
    program: Sequence[PlannedStep], answers: Mapping[Action, Action]
) -> dict[Action, tuple[Action, ...]]:
    """``answers``: by send, the action at which its receipt is known."""
    by_action: dict[Action, list[Action]] = {}
    for send, action in answers.items():
        by_action.setdefault(action, []).append(send)
    ends: dict[Action, tuple[Action, ...]] = {}
    ready: list[Action] = []
    for step in program:
        if step.action.is_send and ready:
            ends[step.action] = tuple(ready)
            ready = []
        ready += by_action.get(step.action, ())
    return ends


def _after_others(
    program: Sequence[PlannedStep], answered: Iterable[Action], most_unanswered: int
) -> dict[Action, tuple[Action, ...]]:
    heard_of = set(answered)
    ends: dict[Action, tuple[Action, ...]] = {}
    unanswered: deque[Action] = deque()
    for step in program:
        if step.action.is_send and step.action not in heard_of:
            if len(unanswered) == most_unanswered:
                ends[step.action] = (unanswered.popleft(),)
            unanswered.append(step.action)
    return ends


def _waiting(
    programs: Sequence[Sequence[PlannedStep]], ends: Sequence[Mapping[Action, tuple[Action, ...]]]
) -> list[list[PlannedStep]]:
    """The same, where a receive says that it was posted, and a send waits for that of those that it ends."""

    def step(rank: int, step: PlannedStep) -> PlannedStep:
        if step.action.is_receive:
            return step._replace(gives=(_posted(step.action),))
        return step._replace(needs=step.needs + tuple(map(_posted, ends[rank].get(step.action, ()))))

    return [[step(rank, one) for one in program] for rank, program in enumerate(programs)]


def _ends(programs: Sequence[Sequence[PlannedStep]]) -> bool:
    return all(position == len(program) for position, program in zip(run(programs), programs, strict=True))


def _posted(action: Action) -> Key:
    what, sender, receiver, microbatch = message_of(action)
    return (what[0] + "<", sender, receiver, microbatch)


class _Clocks:
    """``seen[a][b]``: how many actions of rank b have ended, as rank a knows.

    Attributes:
        answers: of each rank, by send, the action that can't have begun before the message was received.
    """

    def __init__(
        self, programs: Sequence[Sequence[PlannedStep]], links: Collection[tuple[int, int]] | None
    ) -> None:
        self._links = links
        self._seen = [[0] * len(programs) for _ in programs]
        self._attached: dict[Key, tuple[int, ...]] = {}
        self._takers = {
            key: (rank, position)
            for rank, program in enumerate(programs)
            for position, step in enumerate(program)
            if step.action.is_compute
            for key in step.needs
            if key[0].endswith(">")
        }
        self._open: list[dict[int, deque[tuple[Action, int]]]] = [{} for _ in programs]
        self.answers: tuple[dict[Action, Action], ...] = tuple({} for _ in programs)

    def step(self, rank: int, position: int, step: PlannedStep) -> None:
        """A rank does the next of its actions."""
        seen = self._seen[rank]
        heard = [self._attached.pop(key) for key in step.needs if key in self._attached]
        if heard:
            seen[:] = map(max, seen, *heard)
            self._match_open_sends(rank, step.action)
        seen[rank] = position + 1
        for key in step.sends:
            if self._links is not None and key[1:3] not in self._links:
                continue
            taker, place = self._takers[key]
            self._attached[key] = tuple(seen)
            self._open[rank].setdefault(taker, deque()).append((step.action, place))

    def _match_open_sends(self, rank: int, action: Action) -> None:
        """Messages to one rank are taken in any order, so all that are open are looked at."""
        for other, messages in self._open[rank].items():
            ended = self._seen[rank][other]
            left = deque[tuple[Action, int]]()
            for send, place in messages:
                if place < ended:
                    self.answers[rank][send] = action
                else:
                    left.append((send, place))
            self._open[rank][other] = left
