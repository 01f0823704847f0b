"""What lies in the memory of ranks for gradients of tied parameters that are on their way.

In each microbatch one goes from the last stage that holds the parameters straight to the first, while the
microbatch's own gradient goes through all stages between. So several wait at a time, at either end::

    rank 0   ...  0B0  0F4  0B1  0F5        has received what 0B1 takes while 0B0 and 0F4 run
    rank 3   ...  3B3  3F4  3B4             holds what it has sent for microbatch 0 until 3F4 tells it that
                                            0B0 is over: with 3B3 those of 0 to 3

Of two stages on one rank nothing is sent, and it waits there from the one's pass to the other's. So does the
gradient of any other value that the two have (`StageCost.handed_gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from partita.planning.costs.stage_cost import StageCost
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.arrivals import MOST_UNANSWERED
from partita.planning.simulating.messages import RECEIVED_AHEAD

__all__ = ["tied_beside_passes", "untied_gradients"]

_BACKWARD = (ActionKind.I, ActionKind.B)
_Key = tuple[bool, int, int | None]
"""Whether a pass goes back, its stage and its microbatch."""


def tied_beside_passes(
    rows: Sequence[Sequence[Action]], costs: Sequence[StageCost], stage_ranks: Sequence[int]
) -> list[list[int]]:
    """For each rank the bytes of such gradients beside each of its passes.

    Args:
        rows: for each rank its passes, in order.
        costs: one a stage.
        stage_ranks: the rank of each stage.

    >>> from partita.planning import get_schedule
    >>> rows = [list(filter(None, row)) for row in get_schedule("1F1B")(2, 3).rows]
    >>> tied_beside_passes(rows, [StageCost(1, 2), StageCost(1, 2, tied_gradients=((0, 8),))], (0, 1))
    [[8, 8, 8, 16, 8, 0], [0, 0, 8, 8, 16, 16]]
    """
    ways = _Ways(rows, costs, stage_ranks)
    beside = [[0] * (len(row) + 1) for row in rows]
    for sender, cost in enumerate(costs):
        for to, size in (*cost.tied_gradients, *cost.handed_gradients):
            for rank, start, end in ways.waits(sender, to):
                beside[rank][start] += size
                beside[rank][max(start, end)] -= size
    return [list(accumulate(row[:-1])) for row in beside]


def untied_gradients(costs: Sequence[StageCost], stage_ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each stage, what B or I is sent by other ranks and sends back to them without such gradients."""
    arriving = [cost.arriving_gradient_bytes for cost in costs]
    returned = [cost.returned_gradient_bytes for cost in costs]
    for sender, cost in enumerate(costs):
        for to, size in cost.tied_gradients:
            arriving[to] = max(arriving[to] - size, 0)
            if stage_ranks[to] != stage_ranks[sender]:
                returned[sender] = max(returned[sender] - size, 0)
    return arriving, returned


class _Ways:
    """Which pass of a rank takes what another one sends, and hears of what that one has done."""

    def __init__(
        self, rows: Sequence[Sequence[Action]], costs: Sequence[StageCost], stage_ranks: Sequence[int]
    ) -> None:
        self._rows = rows
        self._costs = costs
        self._ranks = stage_ranks
        self._places: dict[_Key, int] = {
            (action.kind is not ActionKind.F, action.stage, action.microbatch): place
            for row in rows
            for place, action in enumerate(row)
            if action.kind is not ActionKind.W
        }

    def waits(self, sender: int, to: int) -> list[tuple[int, int, int]]:
        """Where each microbatch's gradient waits: a rank, the first pass and the one after the last."""
        here, there = self._ranks[sender], self._ranks[to]
        places = [
            (place, self._place(there, True, to, action.microbatch))
            for place, action in enumerate(self._rows[here])
            if action.kind in _BACKWARD and action.stage == sender
        ]
        if here == there:
            return [(here, place + 1, taken) for place, taken in places]
        takers, heard = self._takers(here, there, sender, to), self._heard(here, there)
        sending = [self._messages(action) for action in self._rows[here]]
        waits = []
        for place, taken in places:
            waits.append((here, place + 1, _freed(place, taken, heard, sending)))
            if takers[place] < len(self._rows[there]):
                waits.append((there, max(takers[place] - RECEIVED_AHEAD, 0), taken))
        return waits

    def _place(self, rank: int, back: bool, stage: int, microbatch: int | None) -> int:
        """Of a pass in its rank's row; behind the row where there is none."""
        return self._places.get((back, stage, microbatch), len(self._rows[rank]))

    def _messages(self, action: Action) -> int:
        """How many messages a pass sends."""
        if action.kind is ActionKind.W:
            return 0
        rank, cost = self._ranks[action.stage], self._costs[action.stage]
        if action.kind is ActionKind.F:
            return self._rank_of(action.stage + 1) not in (rank, None)
        to = {action.stage - 1, *(stage for stage, _ in cost.tied_gradients)}
        return sum(self._rank_of(stage) not in (rank, None) for stage in to)

    def _rank_of(self, stage: int) -> int | None:
        return self._ranks[stage] if 0 <= stage < len(self._ranks) else None

    def _takers(self, here: int, there: int, sender: int, to: int) -> list[int]:
        """For each pass, the first pass there that takes a tied gradient of it, or a message that is sent
        later: a rank receives what another one sends in its order.
        """
        first, takers = len(self._rows[there]), list[int]()
        for action in reversed(self._rows[here]):
            stage, number, back = action.stage, action.microbatch, action.kind in _BACKWARD
            if back and stage == sender:
                first = min(first, self._place(there, True, to, number))
            takers.append(first)
            after = stage - 1 if back else stage + 1
            if action.kind is not ActionKind.W and self._rank_of(after) == there:
                first = min(first, self._place(there, back, after, number))
        return takers[::-1]

    def _heard(self, here: int, there: int) -> list[int]:
        """For each pass, up to which pass there its rank knows by what it has taken; -1: of none."""
        heard, latest = list[int](), -1
        stages = [stage for stage, rank in enumerate(self._ranks) if rank == there]
        for action in self._rows[here]:
            if action.kind is ActionKind.F:
                origins = [(False, stage) for stage in stages if stage < action.stage][-1:]
            else:
                origins = [(True, stage) for stage in stages if stage > action.stage][:1]
            if action.kind is not ActionKind.W:
                latest = max(
                    [latest, *(self._places.get((*origin, action.microbatch), -1) for origin in origins)]
                )
            heard.append(latest)
        return heard


def _freed(place: int, taken: int, heard: Sequence[int], sending: Sequence[int]) -> int:
    """The pass from which on a rank is rid of what it sent in the pass at a place: the one behind the next
    that sends something, once it has heard that the gradient was taken; where it never hears that, once it
    has sent many others.
    """
    is_heard = heard[-1] >= taken
    later = 0
    for position in range(place + 1, len(heard)):
        later += sending[position]
        if sending[position] and (heard[position] >= taken if is_heard else later >= MOST_UNANSWERED):
            return position + 1
    return len(heard)
