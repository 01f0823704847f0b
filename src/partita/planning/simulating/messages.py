"""What lies in the memory of a rank for messages while it computes.

The runtime receives what the next passes take while a pass runs, and holds the gradients that it has sent
back until it has heard, by other messages, that they were taken (`partita.planning.schedules.arrivals`)::

    rank 0   F3   B0   F4   B1   F5         while 1B2 runs, what 1F5 takes is being received. What 1B0 has
               \\   /    \\                 sent back was taken by 0B0, and 0F4, which comes behind that, told
    rank 1   B0   F3   B1   F4   B2         1F4 so: it is gone since. What 1B1 has sent is held.

So how much that is depends on the passes of all ranks: under 1F1B one gradient is held, and up to sixteen
where nobody answers within the step. And a message is received before the later ones of its sender, whichever
is needed first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol, TypeVar

from partita.planning.schedules.arrivals import MOST_UNANSWERED

__all__ = ["RECEIVED_AHEAD", "Beside", "PlacedPass", "messages_beside"]

RECEIVED_AHEAD = 2
"""How many passes ahead of the one that takes it a message is being received."""

PlacedPass = tuple[int, int, int]
"""A pass: its kind (F 0, I 1, W 2, B 3), its stage, its microbatch."""

_W = 2
_Message = tuple[bool, int, int]
"""Whether it goes back, the stage that sends it, the microbatch."""


class _Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


_T = TypeVar("_T", bound=_Ordered)


class Beside(NamedTuple):
    """What lies on a rank for messages beside a pass.

    Attributes:
        coming: for each message that later passes take and that is being received, whether it goes back, and
            the stage that takes it; in order.
        sent: the stages whose gradients, sent back, are held, in order; one that occurs twice has those of
            two microbatches.
    """

    coming: tuple[tuple[bool, int], ...]
    sent: tuple[int, ...]


def messages_beside(
    rows: Sequence[Sequence[PlacedPass]], stage_ranks: Sequence[int], returning: Collection[int]
) -> list[list[Beside]]:
    """For each rank what lies there beside each of its passes; what the pass itself takes counts with it.

    Args:
        rows: for each rank its passes, in order; each stage feeds the next.
        stage_ranks: the rank of each stage.
        returning: the stages that send gradients back.

    >>> first = [(0, 0, 0), (0, 0, 1), (3, 0, 0), (3, 0, 1)]
    >>> last = [(0, 1, 0), (3, 1, 0), (0, 1, 1), (3, 1, 1)]
    >>> beside = messages_beside([first, last], (0, 1), {1})
    >>> [len(one.coming) for one in beside[0]], [len(one.sent) for one in beside[1]]
    ([1, 2, 1, 0], [0, 0, 1, 1])
    """
    clocks = _Clocks(rows, stage_ranks, returning)
    clocks.run()
    coming: list[list[tuple[int, int, tuple[bool, int]]]] = [[] for _ in rows]
    for sends in clocks.sends:
        first = [len(row) for row in rows]
        for sent in reversed(sends):
            first[sent.to] = min(first[sent.to], sent.taker)
            takes = sent.goes_back, sent.stage + (-1 if sent.goes_back else 1)
            coming[sent.to].append((max(first[sent.to] - RECEIVED_AHEAD, 0), sent.taker, takes))
    beside = []
    for row, arriving, sends in zip(rows, coming, clocks.sends, strict=True):
        gradients = [
            (sent.place + 1, len(row) if sent.last is None else sent.last + 1, sent.stage)
            for sent in sends
            if sent.goes_back
        ]
        each = zip(_at_each(len(row), arriving), _at_each(len(row), gradients), strict=True)
        beside.append([Beside(takes, stages) for takes, stages in each])
    return beside


@dataclass(slots=True, eq=False)
class _Sent:
    """A message that a pass has sent.

    Attributes:
        place: of the pass in its row.
        stage: of the pass.
        goes_back: whether it is a gradient; of a value the memory is its stage's anyway.
        to: the rank that takes it.
        taker: the place of the pass there that does.
        is_answered: whether its rank hears that it was taken.
        last: the last pass beside which it is held; None: it is held to the end.
    """

    place: int
    stage: int
    goes_back: bool
    to: int
    taker: int
    is_answered: bool = False
    last: int | None = None


@dataclass(eq=False)
class _Clocks:
    """How far each rank knows each other one to be: the vector clocks of the runtime, on passes alone.

    Attributes:
        sends: of each rank, in order.
    """

    rows: Sequence[Sequence[PlacedPass]]
    stage_ranks: Sequence[int]
    returning: Collection[int]
    sends: list[list[_Sent]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = len(self.rows)
        self.sends = [[] for _ in self.rows]
        self._seen = [[0] * ranks for _ in self.rows]
        self._open: list[dict[int, list[tuple[int, int, _Sent]]]] = [defaultdict(list) for _ in self.rows]
        self._answered: list[list[_Sent]] = [[] for _ in self.rows]
        self._under_way: dict[_Message, list[int]] = {}
        self._places = {
            (kind != 0, stage, microbatch): place
            for row in self.rows
            for place, (kind, stage, microbatch) in enumerate(row)
            if kind != _W
        }

    def run(self) -> None:
        """Run all rows as far as they go, each pass once what it takes has been sent."""
        at = [0] * len(self.rows)
        waiting: dict[_Message, int] = {}
        runnable = deque(range(len(self.rows)))
        while runnable:
            rank = runnable.popleft()
            row = self.rows[rank]
            while at[rank] < len(row):
                taken = self._taken(rank, row[at[rank]])
                if taken is not None and taken not in self._under_way:
                    waiting[taken] = rank
                    break
                sent = self._step(rank, at[rank], taken)
                at[rank] += 1
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
        for sends in self.sends:
            _end_unanswered(sends)

    def _taken(self, rank: int, one: PlacedPass) -> _Message | None:
        """The message that a pass takes from another rank; None where there is none."""
        kind, stage, microbatch = one
        back = kind != 0
        origin = stage + 1 if back else stage - 1
        if kind == _W or not self._is_sent(rank, origin, back):
            return None
        message = (back, origin, microbatch)
        return message if message in self._places else None

    def _is_sent(self, rank: int, origin: int, back: bool) -> bool:
        """Whether a stage sends to its neighbour on a rank."""
        ranks = self.stage_ranks
        return 0 <= origin < len(ranks) and ranks[origin] != rank and (not back or origin in self.returning)

    def _step(self, rank: int, place: int, taken: _Message | None) -> _Message | None:
        """Run a pass; returns the message that it sends."""
        seen = self._seen[rank]
        # 1. What comes in says how far others are.
        if taken is not None:
            news = self._under_way.pop(taken)
            seen[:] = map(max, seen, news)
            for to, unanswered in self._open[rank].items():
                while unanswered and unanswered[0][0] < seen[to]:
                    sent = heappop(unanswered)[-1]
                    sent.is_answered = True
                    self._answered[rank].append(sent)
        seen[rank] = place + 1
        # 2. What was answered is let go of when the next message is sent.
        kind, stage, microbatch = self.rows[rank][place]
        back = kind != 0
        to = stage - 1 if back else stage + 1
        is_message = 0 <= to < len(self.stage_ranks) and self.stage_ranks[to] != rank
        if kind == _W or not is_message or (back and stage not in self.returning):
            return None
        for sent in self._answered[rank]:
            sent.last = place
        self._answered[rank].clear()
        # 3. It takes along what this rank knows.
        there = self.stage_ranks[to]
        taker = self._places.get((back, to, microbatch), len(self.rows[there]))
        sent = _Sent(place, stage, back, there, taker)
        self.sends[rank].append(sent)
        heappush(self._open[rank][there], (taker, place, sent))
        self._under_way[back, stage, microbatch] = list(seen)
        return back, stage, microbatch


def _end_unanswered(sends: Sequence[_Sent]) -> None:
    """Of those that nobody answers, the oldest is waited for when there are many."""
    unanswered = deque[_Sent]()
    for sent in sends:
        if sent.is_answered:
            continue
        if len(unanswered) == MOST_UNANSWERED:
            unanswered.popleft().last = sent.place
        unanswered.append(sent)


def _at_each(places: int, spans: Sequence[tuple[int, int, _T]]) -> list[tuple[_T, ...]]:
    """For each place, in order, what of the spans (first place, the one behind the last, what) there is."""
    begins: list[list[_T]] = [[] for _ in range(places + 1)]
    ends: list[list[_T]] = [[] for _ in range(places + 1)]
    for start, end, what in spans:
        if start < end:
            begins[start].append(what)
            ends[end].append(what)
    at_each: list[tuple[_T, ...]] = []
    now: tuple[_T, ...] = ()
    for begun, ended in zip(begins[:places], ends[:places], strict=True):
        if begun or ended:
            rest = [*now, *begun]
            for what in ended:
                rest.remove(what)
            now = tuple(sorted(rest))
        at_each.append(now)
    return at_each
