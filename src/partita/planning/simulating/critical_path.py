"""Why a step takes as long as it does: the chain of passes and messages that decides, and the waits.

Every pass and every message starts at the very moment at which something else ends: the one before it on
its rank or on its link, or what brings what it takes. From the end of the step back to its start, these make
a chain without a gap. Of two stages whose messages take a second, with F and B of two seconds, it is the one
with capital letters::

    rank 0   0F0 0f1 .. .. .. .. 0b0 .. .. 0B1
    rank 1       > 1F0 1B0 1F1 1B1       >

(J. E. Kelley and M. R. Walker, "Critical-path planning and scheduling", 1959.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.simulating.span import Span

__all__ = ["Causes", "IdleTime"]

_BRINGS = {
    ActionKind.F: ActionKind.SEND_F,
    ActionKind.B: ActionKind.SEND_B,
    ActionKind.I: ActionKind.SEND_B,
}
"""The kind of message that a pass may wait for."""

_MAKES = {ActionKind.SEND_F: (ActionKind.F,), ActionKind.SEND_B: (ActionKind.B, ActionKind.I)}
"""The passes of which one makes what a message carries."""


@dataclass(frozen=True)
class IdleTime:
    """A time in which a rank computes nothing because of something that it waits for.

    Attributes:
        rank: the one that waits.
        start_s: from when on.
        end_s: until when.
        action: the pass that it does then.
        cause: what comes to an end at that moment: a message on its way, or an UNSHARD.
    """

    rank: int
    start_s: float
    end_s: float
    action: Action
    cause: Span


class Causes:
    """Finds for each pass and each message of a step what it waited for last.

    Args:
        spans: the passes, those of a rank in its order.
        transfers: the messages, by their start.
        collectives: the UNSHARD and REDUCE_GRAD actions, those of a rank in its order.
        stage_ranks: the rank of each stage.
        cluster: the links.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        transfers: Sequence[Span],
        collectives: Sequence[Span],
        stage_ranks: Sequence[int],
        cluster: Cluster,
    ) -> None:
        self._ranks = stage_ranks
        self._cluster = cluster
        self._of_rank: dict[int, list[Span]] = defaultdict(list)
        self._lane: dict[int, list[Span]] = defaultdict(list)
        self._on_link: dict[Hashable, dict[float, Span]] = defaultdict(dict)
        self._producer: dict[tuple[ActionKind, int, int | None], tuple[int, int]] = {}
        self._to: dict[tuple[ActionKind, int, int | None], list[Span]] = defaultdict(list)
        for span in spans:
            for part in span.action.passes:
                place = (span.rank, len(self._of_rank[span.rank]))
                self._producer[part.kind, part.stage, part.microbatch] = place
            self._of_rank[span.rank].append(span)
        for span in collectives:
            self._lane[span.rank].append(span)
        for span in transfers:
            action = span.action
            self._to[action.kind, action.other_stage, action.microbatch].append(span)
            if span.end_s > span.start_s:  # one that takes no time keeps no other waiting
                for link in self._links(span):
                    self._on_link[link][span.end_s] = span
        self._position = {id(span): at for row in self._of_rank.values() for at, span in enumerate(row)}
        self._lane_position = {id(span): at for row in self._lane.values() for at, span in enumerate(row)}

    def path(self) -> tuple[Span, ...]:
        """What decides how long the step takes, from its start to its end.

        Where several chains are equally long, the one that stays on a rank.
        """
        every = [row[-1] for row in (*self._of_rank.values(), *self._lane.values()) if row]
        if not every:
            return ()
        step: Span | None = max(every, key=lambda span: (span.end_s, -span.rank))
        chain: list[Span] = []
        while step is not None:
            chain.append(step)
            step = self.of(step)
        return tuple(reversed(chain))

    def idle_times(self) -> tuple[IdleTime, ...]:
        """Every time in which a rank waits before a pass, rank by rank."""
        waits = []
        for rank, row in sorted(self._of_rank.items()):
            free_s = 0.0
            for span in row:
                if span.start_s > free_s:
                    cause = self.of(span)
                    if cause is not None:
                        waits.append(IdleTime(rank, free_s, span.start_s, span.action, cause))
                free_s = span.end_s
        return tuple(waits)

    def of(self, span: Span) -> Span | None:
        """What ended when `span` started; None where it starts with the step."""
        if span.action.is_send:
            return self._before_message(span)
        if span.action.is_whole_stage:
            return self._before_collective(span)
        return self._before_pass(span)

    def _before_pass(self, span: Span) -> Span | None:
        at = self._position[id(span)]
        before = self._of_rank[span.rank][at - 1] if at else None
        if before is not None and before.end_s == span.start_s:
            return before
        for part in span.action.passes:
            brings = _BRINGS.get(part.kind)
            for message in () if brings is None else self._to[brings, part.stage, part.microbatch]:
                if message.end_s == span.start_s:
                    return message
        stages = {part.stage for part in span.action.passes}
        for gathering in self._lane[span.rank]:
            is_unshard = gathering.action.kind is ActionKind.UNSHARD
            if is_unshard and gathering.action.stage in stages and gathering.end_s == span.start_s:
                return gathering
        return None

    def _before_message(self, span: Span) -> Span | None:
        """Its pass, or the message before it on one of its links, or, where its send is written out and comes
        later than its pass, a pass before the send.
        """
        rank, first = self._maker(span.action)
        row = self._of_rank[rank]
        if row[first].end_s == span.start_s:
            return row[first]
        for link in self._links(span):
            before = self._on_link[link].get(span.start_s)
            if before is not None:
                return before
        return next(later for later in row[first:] if later.end_s == span.start_s)

    def _maker(self, action: Action) -> tuple[int, int]:
        """The rank and the place of the pass that makes what a message carries."""
        keys = ((kind, action.stage, action.microbatch) for kind in _MAKES[action.kind])
        return next(self._producer[key] for key in keys if key in self._producer)

    def _before_collective(self, span: Span) -> Span | None:
        at = self._lane_position[id(span)]
        before = self._lane[span.rank][at - 1] if at else None
        if before is not None and before.end_s == span.start_s and before.end_s > before.start_s:
            return before
        rows = [self._of_rank[span.rank], *self._of_rank.values(), *self._lane.values()]
        ended = (one for row in rows for one in row if one.end_s == span.start_s and one is not span)
        return next(ended, None)

    def _links(self, span: Span) -> tuple[Hashable, ...]:
        return self._cluster.links(span.rank, self._ranks[span.action.other_stage])
