"""How large the messages between the ranks of a step are, and what stages of one rank hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from partita.planning.costs.stage_cost import StageCost
from partita.planning.simulating.messages import Link, PlacedPass, RankMessages

__all__ = ["Handed", "MessageSizes", "handed_beside", "handed_on_ranks", "message_sizes"]

Handed = tuple[int, int, int]
"""A stage, the earlier one on its rank that it hands gradients to, and their bytes for one microbatch."""

_BACKWARD = (1, 3)


class MessageSizes(NamedTuple):
    """Bytes by link, for one microbatch.

    Attributes:
        coming: what the taker's rank receives.
        sent: what the sender's rank holds of a gradient until it was taken. Costs that were made up may have
            it apart from what comes.
    """

    coming: dict[Link, int]
    sent: dict[Link, int]

    def beside(self, messages: RankMessages, passes: int) -> list[int]:
        """What lies on a rank beside each of its so many passes."""
        change = [0] * (passes + 1)
        for of_links, sizes in ((messages.coming, self.coming), (messages.sent, self.sent)):
            for link, (begins, ends) in of_links.items():
                size = sizes[link]
                if size:
                    for place in begins:
                        change[place] += size
                    for place in ends:
                        change[place] -= size
        change.pop()
        return list(accumulate(change))


def message_sizes(costs: Sequence[StageCost], stage_ranks: Sequence[int]) -> MessageSizes:
    """The bytes of each link: those of values and their gradients, and of gradients of tied parameters.

    >>> costs = [StageCost(1, 2), StageCost(1, 2, arriving_bytes=5, tied_gradients=((0, 8),))]
    >>> message_sizes(costs, (0, 1)).coming
    {(False, 0, 1): 5, (True, 1, 0): 8}
    """
    coming: dict[Link, int] = {}
    sent: dict[Link, int] = {}
    arriving, returned = _untied(costs, stage_ranks)
    for stage, (cost, here) in enumerate(zip(costs, stage_ranks, strict=True)):
        if cost.sent_values is None:
            # All of it comes from the neighbours, and goes to them.
            if stage and stage_ranks[stage - 1] != here:
                coming[False, stage - 1, stage] = cost.arriving_bytes
                if returned[stage]:
                    coming[True, stage, stage - 1] = arriving[stage - 1]
                    sent[True, stage, stage - 1] = returned[stage]
        else:
            for to, size in cost.sent_values:
                if stage_ranks[to] != here:
                    coming[False, stage, to] = size
            for to, size in cost.handed_gradients:
                if stage_ranks[to] != here:
                    coming[True, stage, to] = sent[True, stage, to] = size
        for to, size in cost.tied_gradients:
            if stage_ranks[to] != here:
                for sizes in (coming, sent):
                    sizes[True, stage, to] = sizes.get((True, stage, to), 0) + size
    return MessageSizes(coming, sent)


def _untied(costs: Sequence[StageCost], stage_ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each stage, what B or I is sent by other ranks and sends back to them without gradients of tied
    parameters.
    """
    arriving = [cost.arriving_gradient_bytes for cost in costs]
    returned = [cost.returned_gradient_bytes for cost in costs]
    for sender, cost in enumerate(costs):
        for to, size in cost.tied_gradients:
            arriving[to] = max(arriving[to] - size, 0)
            if stage_ranks[to] != stage_ranks[sender]:
                returned[sender] = max(returned[sender] - size, 0)
    return arriving, returned


def handed_on_ranks(costs: Sequence[StageCost], stage_ranks: Sequence[int]) -> list[list[Handed]]:
    """For each rank, the gradients that its stages hand to each other."""
    handed: list[list[Handed]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, cost in enumerate(costs):
        for to, size in (*cost.handed_gradients, *cost.tied_gradients):
            if stage_ranks[to] == stage_ranks[stage] and size:
                handed[stage_ranks[stage]].append((stage, to, size))
    return handed


def handed_beside(row: Sequence[PlacedPass], handed: Sequence[Handed]) -> list[int]:
    """The bytes of gradients that wait on their rank beside each of its passes, from that of the one stage to
    that of the other, which they count with.

    >>> handed_beside([(0, 0, 0), (0, 1, 0), (3, 1, 0), (0, 0, 1), (3, 0, 0)], [(1, 0, 8)])
    [0, 0, 0, 8, 0]
    """
    change = [0] * (len(row) + 1)
    for stage, to, size in handed:
        for place, (kind, at, _) in enumerate(row):
            if kind in _BACKWARD and at in (stage, to):
                change[place + (at == stage)] += size if at == stage else -size
    return list(accumulate(change[:-1]))
