"""Interleaved zero bubble: interleaved 1F1B whose idle time is filled with gradients of weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from partita.planning.generators.interleaved_1f1b import interleaved_rows
from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import Done, Rows
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["interleaved_zero_bubble"]


def interleaved_zero_bubble(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Interleaved 1F1B with B cut into I, on which the stage before waits, and W, which nobody waits for.

    A rank runs W where it would idle, and where it would otherwise hold more activations than the first rank
    of interleaved 1F1B. With one stage a rank this is the ZB-H1 of the paper::

        rank 0   0F0 0F1  .  0I0 0W0 0F2 0I1 0W1  .  0I2 0W2
        rank 1    .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    (P. Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.)

    Args and errors are those of `interleaved_1f1b`.
    """
    stage_ranks = place("InterleavedZeroBubble", stages, microbatches, ranks, placement)
    orders = [[action for action in row if action] for row in interleaved_rows(stage_ranks, microbatches)]
    allowance = max(_most_held(order) for order in orders)
    split = [[_input_half(action) for action in order] for order in orders]
    rows = _fill(split, stages, allowance)
    return Schedule("InterleavedZeroBubble", stage_ranks, microbatches, rows)


def _input_half(action: Action) -> Action:
    if action.kind is ActionKind.B:
        return Action(action.stage, ActionKind.I, action.microbatch)
    return action


def _most_held(order: Sequence[Action]) -> int:
    in_flight = most = 0
    for action in order:
        in_flight += 1 if action.kind is ActionKind.F else -1
        most = max(most, in_flight)
    return most


def _fill(orders: Sequence[Sequence[Action]], stages: int, allowance: int) -> Rows:
    """Lay `orders` of F and I out on a common clock, with every W where it is in nobody's way."""
    done = Done(stages)
    rows: list[list[Action | None]] = [[] for _ in orders]
    heads = [0] * len(orders)
    in_flight = [0] * len(orders)
    late: list[deque[Action]] = [deque() for _ in orders]
    left = 2 * sum(len(order) for order in orders) - sum(
        a.kind is ActionKind.F for order in orders for a in order
    )
    while left:
        tick: list[Action | None] = []
        for rank, order in enumerate(orders):
            head = order[heads[rank]] if heads[rank] < len(order) else None
            full = head is not None and head.kind is ActionKind.F and in_flight[rank] >= allowance
            if head is not None and done.allows(head) and not (full and late[rank]):
                heads[rank] += 1
                tick.append(head)
                if head.kind is ActionKind.F:
                    in_flight[rank] += 1
                else:
                    late[rank].append(Action(head.stage, ActionKind.W, head.microbatch))
            elif late[rank]:
                in_flight[rank] -= 1
                tick.append(late[rank].popleft())
            else:
                tick.append(None)
        left -= len(tick) - tick.count(None)
        done.add(tick)
        for row, cell in zip(rows, tick, strict=True):
            row.append(cell)
    return tuple(tuple(row) for row in rows)
