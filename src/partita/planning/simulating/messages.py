"""What lies in the memory of a rank for messages while it computes.

The runtime receives what the next passes take while a pass runs, and holds the gradients that it has sent
back until it has heard, by other messages, that they were taken (`partita.planning.schedules.arrivals`)::

    rank 0   F3   B0   F4   B1   F5         while 1B2 runs, what 1F5 takes is being received. What 1B0 has
               \\   /    \\                 sent back was taken by 0B0, and 0F4, which comes behind that, told
    rank 1   B0   F3   B1   F4   B2         1F4 so: it is gone since. What 1B1 has sent is held.

So how much that is depends on the passes of all ranks: under 1F1B one gradient is held, and up to sixteen
where nobody answers within the step. And a message is received before the later ones of its sender, whichever
is needed first. A value goes straight to each stage that takes it, past those between: a skip connection of a
U-Net is received long before it is needed where it has to make room for what its sender sends after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from partita.planning.schedules.arrivals import MOST_UNANSWERED

__all__ = [
    "RECEIVED_AHEAD",
    "Link",
    "PlacedPass",
    "RankMessages",
    "Spans",
    "links_of_neighbours",
    "messages_beside",
]

RECEIVED_AHEAD = 2
"""How many passes ahead of the one that takes it a message is being received."""

PlacedPass = tuple[int, int, int]
"""A pass: its kind (F 0, I 1, W 2, B 3), its stage, its microbatch."""

Link = tuple[bool, int, int]
"""A kind of message: whether it goes back, the stage that sends it, the stage that takes it."""

Spans = tuple[list[int], list[int]]
"""Where something begins to lie, and where it does no more."""

_W = 2


class RankMessages(NamedTuple):
    """What lies on a rank for messages, by link: from which passes on, counted from 0, there is one more, and
    from which on one less.

    Attributes:
        coming: the messages that are being received; what a pass takes is gone from that pass on.
        sent: the gradients, sent back, that are held.
    """

    coming: dict[Link, Spans]
    sent: dict[Link, Spans]


def links_of_neighbours(stage_ranks: Sequence[int], returning: Collection[int]) -> list[Link]:
    """The links where each stage feeds the next.

    Args:
        stage_ranks: the rank of each stage.
        returning: the stages that send gradients back.
    """
    links: list[Link] = []
    for stage, (here, there) in enumerate(pairwise(stage_ranks)):
        if here != there:
            links.append((False, stage, stage + 1))
            links += [(True, stage + 1, stage)] if stage + 1 in returning else []
    return links


def messages_beside(
    rows: Sequence[Sequence[PlacedPass]], stage_ranks: Sequence[int], links: Collection[Link]
) -> list[RankMessages]:
    """For each rank what lies there beside its passes; what a pass itself takes counts with the pass.

    Args:
        rows: for each rank its passes, in order.
        stage_ranks: the rank of each stage.
        links: which stages on different ranks send to each other.

    >>> first = [(0, 0, 0), (0, 0, 1), (3, 0, 0), (3, 0, 1)]
    >>> last = [(0, 1, 0), (3, 1, 0), (0, 1, 1), (3, 1, 1)]
    >>> beside = messages_beside([first, last], (0, 1), links_of_neighbours((0, 1), {1}))
    >>> beside[0].coming, beside[1].sent
    ({(True, 1, 0): ([1, 0], [3, 2])}, {(True, 1, 0): ([2, 4], [4, 4])})
    """
    sends_of_ranks = _Clocks(rows, stage_ranks, links).run()
    lengths = list(map(len, rows))
    beside = [RankMessages({}, {}) for _ in rows]
    for length, own, sends in zip(lengths, beside, sends_of_ranks, strict=True):
        first = lengths.copy()
        for sent in reversed(sends):
            channel, taker = sent.channel, sent.taker
            there = channel.to
            if taker < first[there]:
                first[there] = taker
            begin = first[there]
            if begin < lengths[there]:
                starts, ends = channel.coming
                starts.append(begin - RECEIVED_AHEAD if begin > RECEIVED_AHEAD else 0)
                ends.append(taker)
                if len(ends) == 1:
                    beside[there].coming[channel.link] = channel.coming
        for sent in sends:
            channel = sent.channel
            if channel.link[0]:
                starts, ends = own.sent.setdefault(channel.link, ([], []))
                starts.append(sent.place + 1)
                ends.append(length if sent.last is None else sent.last + 1)
    return beside


@dataclass(slots=True, eq=False)
class _Sent:
    """A message that a pass has sent.

    Attributes:
        place: of the pass in its row.
        channel: along which it goes; of a value the memory is its stage's anyway.
        taker: the place of the pass that takes it.
        is_answered: whether its rank hears that it was taken.
        last: the last pass beside which it is held; None: it is held to the end.
    """

    place: int
    channel: _Channel
    taker: int
    is_answered: bool = False
    last: int | None = None


@dataclass(slots=True, eq=False)
class _Channel:
    """What goes along a link.

    Attributes:
        to: the rank that takes it.
        sent_at: by microbatch, the place of the pass that sends it.
        taken_at: likewise of the pass that takes it.
        news: by microbatch, of what is under way, what its sender knew (`_Lanes`).
        waiting: by microbatch, the rank that waits for it.
        coming: as in `RankMessages`.
    """

    link: Link
    to: int
    sent_at: dict[int, int]
    taken_at: dict[int, int]
    news: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    coming: Spans = field(default_factory=lambda: ([], []))


class _Lanes:
    """For each rank a number of passes, all in one integer, so that those of two are compared at once.

    A lane has one bit more than its number takes, which is 0. With it set on the one side, the difference of
    two lanes borrows nothing from the next one, and leaves it set where the other side is not larger.
    """

    def __init__(self, most: int, ranks: int) -> None:
        self.width = most.bit_length() + 1
        self._tops = sum(1 << (rank + 1) * self.width - 1 for rank in range(ranks))

    def latest(self, one: int, other: int) -> int:
        """The larger number of each rank."""
        ahead = ((one | self._tops) - other) & self._tops
        return other ^ ((one ^ other) & (ahead - (ahead >> self.width - 1)))

    def of(self, numbers: int, rank: int) -> int:
        """The number of one rank."""
        return (numbers >> rank * self.width) & ((1 << self.width) - 1)


class _Clocks:
    """How far each rank knows each other one to be: the vector clocks of the runtime, on passes alone."""

    def __init__(
        self,
        rows: Sequence[Sequence[PlacedPass]],
        stage_ranks: Sequence[int],
        links: Collection[Link],
    ) -> None:
        self._rows = rows
        self._sends: list[list[_Sent]] = [[] for _ in rows]
        self._lanes = _Lanes(max(map(len, rows), default=0), len(rows))
        self._seen = [0] * len(rows)
        self._open: list[dict[int, list[tuple[int, int, _Sent]]]] = [{} for _ in rows]
        self._answered: list[list[_Sent]] = [[] for _ in rows]
        # For the passes of each stage, forward and back: their places, and what they take and send.
        places: tuple[list[dict[int, int]], ...] = tuple([{} for _ in stage_ranks] for _ in range(2))
        for row in rows:
            for place, (kind, stage, microbatch) in enumerate(row):
                if kind != _W:
                    places[kind != 0][stage][microbatch] = place
        self._into, self._out_of = (
            tuple([list[_Channel]() for _ in stage_ranks] for _ in range(2)) for _ in range(2)
        )
        # The nearest stage is sent its message first.
        for link in sorted(links, key=lambda link: (link[1], abs(link[2] - link[1]))):
            back, sender, taker = link
            channel = _Channel(link, stage_ranks[taker], places[back][sender], places[back][taker])
            self._into[back][taker].append(channel)
            self._out_of[back][sender].append(channel)
            self._open[stage_ranks[sender]].setdefault(channel.to, [])

    def run(self) -> list[list[_Sent]]:
        """Run all rows as far as they go, each pass once all that it takes has been sent; returns what each
        rank sends, in order.
        """
        at, lanes = [0] * len(self._rows), self._lanes
        runnable = deque(range(len(self._rows)))
        while runnable:
            rank = runnable.popleft()
            row, seen = self._rows[rank], self._seen[rank]
            own, own_lane = lanes.of(seen, rank), rank * lanes.width
            for place in range(at[rank], len(row)):
                kind, stage, microbatch = row[place]
                if kind == _W:
                    continue
                # 1. It waits for all that it takes.
                channels = self._into[kind != 0][stage]
                missing = None
                for channel in channels:
                    if microbatch not in channel.news and microbatch in channel.sent_at:
                        missing = channel
                if missing is not None:
                    missing.waiting[microbatch] = rank
                    at[rank] = place
                    break
                # 2. What comes in says how far others are, and so what was answered.
                for channel in channels:
                    news = channel.news.pop(microbatch, 0)
                    if news:
                        seen = lanes.latest(seen, news)
                seen += (place + 1 - own) << own_lane  # nobody else knows more of this rank
                own = place + 1
                if channels:
                    self._answer(rank, seen)
                # 3. Others wait for what it sends.
                channels = self._out_of[kind != 0][stage]
                if channels:
                    self._send(rank, place, microbatch, channels, seen)
                    for channel in channels:
                        if microbatch in channel.waiting:
                            runnable.append(channel.waiting.pop(microbatch))
            self._seen[rank] = seen
        for sends in self._sends:
            _end_unanswered(sends)
        return self._sends

    def _answer(self, rank: int, seen: int) -> None:
        for to, unanswered in self._open[rank].items():
            if not unanswered:
                continue
            reached = self._lanes.of(seen, to)
            while unanswered and unanswered[0][0] < reached:
                sent = heappop(unanswered)[-1]
                sent.is_answered = True
                self._answered[rank].append(sent)

    def _send(self, rank: int, place: int, microbatch: int, channels: Sequence[_Channel], seen: int) -> None:
        # 1. What was answered is let go of when the next message is sent.
        answered = self._answered[rank]
        if answered:
            for sent in answered:
                sent.last = place
            answered.clear()
        # 2. Each message takes along what this rank knows.
        sends, still_open = self._sends[rank], self._open[rank]
        for channel in channels:
            taker = channel.taken_at.get(microbatch)
            if taker is None:
                taker = len(self._rows[channel.to])
            sent = _Sent(place, channel, taker)
            heappush(still_open[channel.to], (taker, len(sends), sent))
            sends.append(sent)
            channel.news[microbatch] = seen


def _end_unanswered(sends: Sequence[_Sent]) -> None:
    """Of those that nobody answers, the oldest is waited for when there are many."""
    unanswered = deque[_Sent]()
    for sent in sends:
        if sent.is_answered:
            continue
        if len(unanswered) == MOST_UNANSWERED:
            unanswered.popleft().last = sent.place
        unanswered.append(sent)
