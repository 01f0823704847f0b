"""What a row of passes holds at each pass, apart from what a stage costs.

What lies there for messages depends on the other rows too, and is given. A row has few states that differ, so
its peak for other costs is known without going through it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import le
from typing import NamedTuple

from partita.planning.costs.stage_cost import StageCost
from partita.planning.searching.orders.clock import Pass, has_backward
from partita.planning.simulating.message_sizes import Handed, MessageSizes
from partita.planning.simulating.messages import Beside, Link

__all__ = ["State", "peak_of", "row_states"]


class State(NamedTuple):
    """What a rank holds when a pass starts.

    Attributes:
        kind: of the pass, F 0, I 1, W 2, B 3.
        stage: of the pass.
        ahead: the messages that are being received (`Beside.coming`).
        sent: the gradients, sent back, that are held (`Beside.sent`).
        counts: (stage, microbatches between F and I or B, microbatches between I and W) of each stage.
        waiting: of each stage but the first, how many I or B it is ahead of the stage in front of it.
    """

    kind: int
    stage: int
    ahead: tuple[Link, ...]
    sent: tuple[Link, ...]
    counts: tuple[tuple[int, int, int], ...]
    waiting: tuple[int, ...]


def row_states(row: Sequence[Pass], messages: Sequence[Beside]) -> list[State]:
    """The states of the row in which it may hold most.

    Args:
        messages: beside each pass, from `messages_beside`.
    """
    trains = has_backward(row)
    forward, backward, done = dict[int, int](), dict[int, int](), dict[int, int]()
    for _, stage, _ in row:
        forward[stage] = backward[stage] = done[stage] = 0
    stages = sorted(forward)
    seen: dict[tuple[int, int, tuple[Link, ...], tuple[Link, ...]], set[tuple[int, ...]]] = {}
    for (kind, stage, _), (ahead, sent) in zip(row, messages, strict=True):
        counts = tuple(count for one in stages for count in (forward[one], backward[one]))
        counts += tuple(done[one] - done[front] for front, one in pairwise(stages))
        seen.setdefault((kind, stage, ahead, sent), set()).add(counts)
        if not trains:
            continue
        if kind == 0:
            forward[stage] += 1
        elif kind == 2:
            backward[stage] -= 1
        else:
            forward[stage] -= 1
            backward[stage] += kind == 1
            done[stage] += 1
    own = 2 * len(stages)
    return [
        State(
            kind,
            stage,
            ahead,
            sent,
            tuple(zip(stages, counts[:own:2], counts[1:own:2], strict=True)),
            counts[own:],
        )
        for (kind, stage, ahead, sent), all_counts in seen.items()
        for counts in _largest(all_counts)
    ]


def _largest(all_counts: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without those of which another one has at least as many of everything."""
    chosen: list[tuple[int, ...]] = []
    for counts in sorted(all_counts, key=lambda one: (-sum(one), one)):
        if not any(all(map(le, counts, other)) for other in chosen):
            chosen.append(counts)
    return chosen


def peak_of(
    states: Sequence[State], costs: Mapping[int, StageCost], sizes: MessageSizes, handed: Sequence[Handed]
) -> int:
    """The most bytes that the row's rank holds.

    Args:
        states: of the row.
        costs: of each of the rank's stages.
        sizes: of messages, from `message_sizes`.
        handed: of the rank, from `handed_on_ranks`.
    """
    always = sum(cost.static_bytes for cost in costs.values())
    kept = {stage: (cost.activation_bytes, cost.weight_bytes) for stage, cost in costs.items()}
    during = {stage: cost.bytes_during_each for stage, cost in costs.items()}
    coming, returned = sizes
    received = dict[tuple[Link, ...], int]()
    holding = dict[tuple[Link, ...], int]()
    most = 0
    for kind, own, ahead, sent, counts, waiting in states:
        if ahead not in received:
            received[ahead] = sum(coming[link] for link in ahead)
        if sent not in holding:
            holding[sent] = sum(returned[link] for link in sent)
        size = during[own][kind] + received[ahead] + holding[sent]
        for stage, forward, backward in counts:
            activations, left = kept[stage]
            size += forward * activations + backward * left
        if handed:
            size += _handed(handed, kind, own, [stage for stage, *_ in counts], waiting)
        if size > most:
            most = size
    return always + most


def _handed(handed: Sequence[Handed], kind: int, own: int, stages: list[int], waiting: Sequence[int]) -> int:
    """The gradients that wait beside a pass, in bytes; those that it takes count with the pass."""
    size = 0
    for stage, to, of_one in handed:
        count = sum(waiting[stages.index(to) : stages.index(stage)])
        size += of_one * (count - (to == own and kind in {1, 3}))
    return size
