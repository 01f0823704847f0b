"""What a row of passes holds at each pass, apart from what a stage costs.

What lies there for messages depends on the other rows too, and is given. A row has few states that differ, so
its peak for other costs is known without going through it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import le
from typing import NamedTuple

from partita.planning.costs.stage_cost import StageCost
from partita.planning.searching.orders.clock import Pass, has_backward
from partita.planning.simulating.message_sizes import Handed, MessageSizes
from partita.planning.simulating.messages import Beside

__all__ = ["RowStates", "State", "peak_of", "row_states"]


class State(NamedTuple):
    """What a rank holds when a pass starts.

    Attributes:
        kind: of the pass, F 0, I 1, W 2, B 3.
        stage: of the pass.
        messages: which of `RowStates.messages` lie there.
        counts: (stage, microbatches between F and I or B, microbatches between I and W) of each stage.
        waiting: of each stage but the first, how many I or B it is ahead of the stage in front of it.
    """

    kind: int
    stage: int
    messages: int
    counts: tuple[tuple[int, int, int], ...]
    waiting: tuple[int, ...]


class RowStates(NamedTuple):
    """The states of a row.

    Attributes:
        states: those in which it may hold most.
        messages: what lies there for messages in any of them, each once.
    """

    states: list[State]
    messages: list[Beside]

    def message_bytes(self, sizes: MessageSizes) -> list[int]:
        """The bytes of each of `messages`."""
        return list(map(sizes.beside, self.messages))


def row_states(row: Sequence[Pass], messages: Sequence[Beside]) -> RowStates:
    """The states of the row in which it may hold most.

    Args:
        messages: beside each pass, from `messages_beside`.
    """
    trains = has_backward(row)
    stages = sorted({stage for _, stage, _ in row})
    own, last = 2 * len(stages), len(stages) - 1
    numbers = {stage: number for number, stage in enumerate(stages)}
    now = [0] * (own + last)
    different: dict[Beside, int] = {}
    seen: dict[tuple[int, int, int], set[tuple[int, ...]]] = {}
    for (kind, stage, _), beside in zip(row, messages, strict=True):
        which = different.setdefault(beside, len(different))
        seen.setdefault((kind, stage, which), set()).add(tuple(now))
        if not trains:
            continue
        number = numbers[stage]
        if kind == 0:
            now[2 * number] += 1
        elif kind == 2:
            now[2 * number + 1] -= 1
        else:
            now[2 * number] -= 1
            now[2 * number + 1] += kind == 1
            if number:
                now[own + number - 1] += 1
            if number < last:
                now[own + number] -= 1
    states = [
        State(
            kind,
            stage,
            which,
            tuple(zip(stages, counts[:own:2], counts[1:own:2], strict=True)),
            counts[own:],
        )
        for (kind, stage, which), all_counts in seen.items()
        for counts in _largest(all_counts)
    ]
    return RowStates(states, list(different))


def _largest(all_counts: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without those of which another one has at least as many of everything."""
    chosen: list[tuple[int, ...]] = []
    for counts in sorted(all_counts, key=lambda one: (-sum(one), one)):
        if not any(all(map(le, counts, other)) for other in chosen):
            chosen.append(counts)
    return chosen


def peak_of(
    states: Sequence[State],
    costs: Mapping[int, StageCost],
    message_bytes: Sequence[int],
    handed: Sequence[Handed],
) -> int:
    """The most bytes that the row's rank holds.

    Args:
        states: of the row.
        costs: of each of the rank's stages.
        message_bytes: from `RowStates.message_bytes`.
        handed: of the rank, from `handed_on_ranks`.
    """
    always = sum(cost.static_bytes for cost in costs.values())
    kept = {stage: (cost.activation_bytes, cost.weight_bytes) for stage, cost in costs.items()}
    during = {stage: cost.bytes_during_each for stage, cost in costs.items()}
    most = 0
    for kind, own, messages, counts, waiting in states:
        size = during[own][kind] + message_bytes[messages]
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
