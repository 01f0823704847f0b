"""Queues laid out on a common clock: the same rows as when each tick looks at every queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ScheduleError
from partita.planning import Action, ActionKind, overlap
from partita.planning.generators.making.ticks import Done, laid_out

URGENCY = {ActionKind.B: 0, ActionKind.I: 0, ActionKind.OVERLAP_F_B: 0, ActionKind.F: 1, ActionKind.W: 2}
Queues = list[list[list[Action]]]


def tick_by_tick(queues: Queues, stages: int) -> list[list[Action | None]] | None:
    """The definition; None where nothing can run and something is left."""
    left = [[list(queue) for queue in of_rank] for of_rank in queues]
    done = Done(stages)
    rows: list[list[Action | None]] = [[] for _ in queues]
    while any(queue for of_rank in left for queue in of_rank):
        tick: list[Action | None] = []
        for of_rank in left:
            ready = [queue for queue in of_rank if queue and done.allows(queue[0])]
            first = min(
                ready,
                key=lambda queue: (
                    URGENCY[queue[0].kind],
                    queue[0].passes[0].microbatch or 0,
                    -queue[0].passes[0].stage,
                ),
                default=None,
            )
            tick.append(None if first is None else first.pop(0))
        if not any(tick):
            return None
        done.add(tick)
        for row, cell in zip(rows, tick, strict=True):
            row.append(cell)
    for row in rows:
        while row and row[-1] is None:
            row.pop()
    return rows


@st.composite
def queues(draw: st.DrawFn) -> tuple[Queues, int]:
    """For each stage one queue of its passes in some order, B whole or in two; stages on any ranks."""
    ranks, stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    of_ranks: Queues = [[] for _ in range(ranks)]
    for stage in range(stages):
        kinds = "FB" if draw(st.booleans()) else "FIW"
        passes = [Action(stage, ActionKind(kind), n) for n in range(microbatches) for kind in kinds]
        ahead = draw(st.integers(0, 3 * microbatches))
        order = sorted(passes, key=lambda one: (one.microbatch or 0) * 4 + (ahead, 0)[one.kind == "F"])
        of_ranks[draw(st.integers(0, ranks - 1))].append(order)
    if draw(st.booleans()) and stages > 1:
        of_ranks[0].append(
            [overlap(Action(0, ActionKind.F, microbatches), Action(stages - 1, ActionKind.B, 0))]
        )
    return of_ranks, stages


@given(queues())
@settings(max_examples=150, deadline=None)
def test_rows_are_those_of_looking_at_every_queue_at_every_tick(case: tuple[Queues, int]) -> None:
    expected = tick_by_tick(*case)
    if expected is None:
        with pytest.raises(ScheduleError, match=r"mine with .* stalls: take another schedule"):
            laid_out(*case, "mine")
    else:
        assert [list(row) for row in laid_out(*case, "mine")] == expected
