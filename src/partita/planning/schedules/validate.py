"""Prove, before anything runs, that a schedule can: each pass once, in an order that never stalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from partita.errors import ScheduleError
from partita.planning.schedules._program import Key, PlannedStep, compile_steps, describe_key, message_of, run
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.edges import EdgeTable, edge_table
from partita.planning.schedules.schedule import Schedule

__all__ = ["validate"]

_F, _I, _W, _B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B


def validate(schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None) -> None:
    """Check `schedule`, and return nothing where it is right.

    - Every action is on the rank of its stage, and names a stage and a microbatch that exist.
    - Every stage runs every microbatch forward once, and backward once: B, or I and then W. A schedule with
      no backward pass at all is right too.
    - A stage's backward pass of a microbatch comes after its forward pass, and W after I.
    - Where sends and receives are written out, each value that goes to another rank is sent once and received
      once, and from one rank to another the messages are received in the order in which they are sent.
    - Run with sends that don't wait and receives that do, no rank waits for ever.

    Args:
        schedule: what to check.
        edges: pairs (producer stage, consumer stage); without them, each stage feeds the next.

    Raises:
        ScheduleError: names the rank, the position in its row, the action, and what to do.

    >>> validate(Schedule.from_csv("0F0,,,0B0\\n,1F0,1B0\\n"))
    """
    table = edge_table(schedule.stages, edges)
    _check_places(schedule)
    _check_passes(schedule)
    if schedule.is_lowered:
        _check_messages(schedule, table)
        _check_channels(schedule)
    _check_progress(schedule, compile_steps(schedule, table))


def _check_places(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action is None:
                continue
            for part in action.passes or (action,):
                where = f"rank {rank}, position {position} ({action})"
                if part.stage >= schedule.stages:
                    raise ScheduleError(
                        f"{where}: there is no stage {part.stage}, stages are 0 to {schedule.stages - 1}"
                    )
                if schedule.stage_ranks[part.stage] != rank:
                    raise ScheduleError(
                        f"{where}: stage {part.stage} is on rank {schedule.stage_ranks[part.stage]}; move "
                        "the action there"
                    )
                if part.microbatch is not None and part.microbatch >= schedule.microbatches:
                    raise ScheduleError(
                        f"{where}: there is no microbatch {part.microbatch}, they are 0 to "
                        f"{schedule.microbatches - 1}"
                    )


def _check_passes(schedule: Schedule) -> None:
    trains = schedule.has_backward
    where: dict[tuple[ActionKind, int, int], tuple[int, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            for part in () if action is None else action.passes:
                key = (part.kind, part.stage, part.microbatch or 0)
                if key in where:
                    raise ScheduleError(
                        f"rank {rank}, position {position} ({action}): {part} is already at position "
                        f"{where[key][1]}; keep one of the two"
                    )
                where[key] = (rank, position)
    for stage, rank in enumerate(schedule.stage_ranks):
        for microbatch in range(schedule.microbatches):
            kinds = {
                kind: where[kind, stage, microbatch][1]
                for kind in (_F, _I, _W, _B)
                if (kind, stage, microbatch) in where
            }
            _check_pass(rank, stage, microbatch, kinds, trains)


def _check_pass(rank: int, stage: int, microbatch: int, kinds: dict[ActionKind, int], trains: bool) -> None:
    """Check the passes of one stage on one microbatch, given the position of each in its row."""
    of = f"rank {rank}, stage {stage}, microbatch {microbatch}"

    def text(kind: ActionKind) -> str:
        return f"{stage}{kind}{microbatch}"

    if _F not in kinds:
        raise ScheduleError(f"{of}: there is no forward pass; add {text(_F)}")
    if not trains:
        return
    if _B in kinds and (_I in kinds or _W in kinds):
        extra = _I if _I in kinds else _W
        raise ScheduleError(
            f"{of}: {text(_B)} at position {kinds[_B]} and {text(extra)} at position {kinds[extra]} both go "
            "back; give B, or I and W"
        )
    if _B not in kinds:
        for kind in (_I, _W):
            if kind not in kinds:
                raise ScheduleError(
                    f"{of}: there is no whole backward pass; add {text(_B)}, or {text(kind)} to the other "
                    "half"
                )
    pairs = ((_F, _B),) if _B in kinds else ((_F, _I), (_I, _W))
    for first, second in pairs:
        if kinds[first] >= kinds[second]:
            raise ScheduleError(
                f"rank {rank}, position {kinds[second]} ({text(second)}): it needs {text(first)}, "
                f"which is at position {kinds[first]}; move it before"
            )


def _check_messages(schedule: Schedule, table: EdgeTable) -> None:
    trains = schedule.has_backward
    due: Counter[Key] = Counter()
    for consumer, producers in enumerate(table.producers):
        for producer in producers:
            if schedule.stage_ranks[producer] != schedule.stage_ranks[consumer]:
                for microbatch in range(schedule.microbatches):
                    due["F>", producer, consumer, microbatch] = 1
                    if trains:
                        due["G>", consumer, producer, microbatch] = 1
    sent: Counter[Key] = Counter()
    received: Counter[Key] = Counter()
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action is None or not action.is_communication:
                continue
            message = message_of(action)
            if message not in due:
                raise ScheduleError(
                    f"rank {rank}, position {position} ({action}): nothing goes there from stage "
                    f"{message[1]} to stage {message[2]} (no edge, or one rank holds both); remove it"
                )
            count = sent if action.is_send else received
            count[message] += 1
            if count[message] > 1:
                raise ScheduleError(
                    f"rank {rank}, position {position} ({action}): it stands twice; remove one"
                )
    for message in due:
        for count, arrow, stage in ((sent, ">", message[1]), (received, "<", message[2])):
            if not count[message]:
                missing = describe_key((message[0][0] + arrow, *message[1:]))
                raise ScheduleError(
                    f"rank {schedule.stage_ranks[stage]}: {missing} is missing; add it, or use lower()"
                )


def _check_channels(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Key]] = {}
    received: dict[tuple[int, int], list[tuple[Key, int, Action]]] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action is None or not action.is_communication:
                continue
            other = schedule.stage_ranks[action.other_stage]
            if action.is_send:
                sent.setdefault((rank, other), []).append(message_of(action))
            else:
                received.setdefault((other, rank), []).append((message_of(action), position, action))
    for (source, target), messages in received.items():
        for wanted, (message, position, action) in zip(sent[source, target], messages, strict=True):
            if message != wanted:
                raise ScheduleError(
                    f"rank {target}, position {position} ({action}): the next message from rank {source} is "
                    f"{describe_key(wanted)}; receive in the order of the sends, or use lower()"
                )


def _check_progress(schedule: Schedule, programs: list[list[PlannedStep]]) -> None:
    available: set[Key] = set()
    at = run(programs, lambda _, __, step: available.update(step.gives, step.sends))
    stuck = []
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            step = program[at[rank]]
            position = [index for index, action in enumerate(schedule.rows[rank]) if action is not None][
                at[rank]
            ]
            missing = next(key for key in step.needs if key not in available)
            stuck.append(
                f"rank {rank} waits at position {position} ({step.action}) for {describe_key(missing)}"
            )
    if stuck:
        shown = "; ".join(stuck[:8]) + ("; ..." if len(stuck) > 8 else "")
        raise ScheduleError(
            f"the schedule stalls: {shown}. Move what is waited for before what waits, on its own rank"
        )
