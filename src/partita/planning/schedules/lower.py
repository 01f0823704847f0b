"""Write the sends and receives of a schedule out, in an order that both ends of every link agree on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from partita.errors import ScheduleError
from partita.planning.schedules._program import Key, PlannedStep, compile_steps
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.edges import edge_table
from partita.planning.schedules.schedule import Schedule
from partita.planning.schedules.validate import validate

__all__ = ["lower"]


def lower(schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None) -> Schedule:
    """The same schedule with SEND_F, RECV_F, SEND_B and RECV_B; idle ticks are left out.

    A send stands right after the pass that makes its value. A receive stands before the pass that takes it,
    and earlier where a later message of the same link is needed first, so that from one rank to another
    messages are received in the order in which they are sent. Stages on one rank exchange nothing::

        rank 0   0F0  0SEND_F0  0F1  0SEND_F1  0RECV_B0  0B0 ...
        rank 1   1RECV_F0  1F0  1B0  1SEND_B0  1RECV_F1  1F1 ...

    Args:
        schedule: compute actions, with or without others that are no sends or receives (those stay where they
            are).
        edges: pairs (producer stage, consumer stage); without them, each stage feeds the next. An action that
            is not about the neighbouring stage carries the other stage's number as its `peer`.

    Raises:
        ScheduleError: it is lowered already, or `validate` refuses it.
    """
    if schedule.is_lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r} has sends and receives already: use it, or lower compute_only()"
        )
    pairs = None if edges is None else tuple(edges)
    validate(schedule, pairs)
    table = edge_table(schedule.stages, pairs)
    rows = _Lowering(schedule, compile_steps(schedule, table, lowered=False)).run()
    return Schedule(schedule.name, schedule.stage_ranks, schedule.microbatches, rows)


class _Lowering:
    """Runs the schedule without times, and writes down what each rank does.

    A receive is written when its message, and every message before it on the same link, has been sent. The
    order in which the actions are written is thus one in which they can be run. The schedule is known to come
    to its end.
    """

    def __init__(self, schedule: Schedule, programs: list[list[PlannedStep]]) -> None:
        self._rank = schedule.stage_ranks
        self._programs = programs
        self._rows: list[list[Action | None]] = [[] for _ in programs]
        self._done: set[Key] = set()
        self._received: set[Key] = set()
        self._links: dict[tuple[int, int], deque[Key]] = {}

    def run(self) -> tuple[tuple[Action | None, ...], ...]:
        at = [0] * len(self._programs)
        waiting: dict[Key, list[int]] = {}
        runnable = deque(range(len(self._programs)))
        while runnable:
            rank = runnable.popleft()
            program = self._programs[rank]
            while at[rank] < len(program):
                step = program[at[rank]]
                missing = next((key for key in step.needs if key not in self._done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                at[rank] += 1
                self._write(rank, step)
                for key in (*step.gives, *step.sends):
                    self._done.add(key)
                    runnable.extend(waiting.pop(key, ()))
        return tuple(tuple(row) for row in self._rows)

    def _write(self, rank: int, step: PlannedStep) -> None:
        for key in step.needs:
            if key[0].endswith(">") and key not in self._received:
                self._receive_up_to(rank, key)
        self._rows[rank].append(step.action)
        for key in step.sends:
            self._rows[rank].append(_send(key))
            self._links.setdefault((rank, self._rank[key[2]]), deque()).append(key)

    def _receive_up_to(self, rank: int, wanted: Key) -> None:
        link = self._links[self._rank[wanted[1]], rank]
        while wanted not in self._received:
            key = link.popleft()
            self._received.add(key)
            self._rows[rank].append(_receive(key))


def _send(message: Key) -> Action:
    what, sender, receiver, microbatch = message
    kind = ActionKind.SEND_F if what == "F>" else ActionKind.SEND_B
    neighbour = sender + 1 if kind is ActionKind.SEND_F else sender - 1
    return Action(sender, kind, microbatch, peer=None if receiver == neighbour else receiver)


def _receive(message: Key) -> Action:
    what, sender, receiver, microbatch = message
    kind = ActionKind.RECV_F if what == "F>" else ActionKind.RECV_B
    neighbour = receiver - 1 if kind is ActionKind.RECV_F else receiver + 1
    return Action(receiver, kind, microbatch, peer=None if sender == neighbour else sender)
