"""What a schedule is made for: the times of each stage's passes, of messages, and the memory of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from partita.planning.costs.sent_along import sent_along
from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules.actions import ActionKind

__all__ = ["Hop", "Problem", "scheduling_problem", "travel_s"]


class Hop(NamedTuple):
    """A pass of one kind and stage, and where its result goes.

    A pass has a number, ``stage * microbatches + microbatch``, and a list of arrivals has a place for what
    each F takes, by number, then one for what each B or I takes, one a microbatch for what nobody takes, and
    one a microbatch for what is always there.

    Attributes:
        seconds: that it takes.
        takes: with the number added, the place of what it takes.
        gives: with the number added, the place of what it makes.
        travel_s: seconds that this travels.
        there: the rank that it travels to; -1 where it stays.
    """

    seconds: float
    takes: int
    gives: int
    travel_s: float
    there: int


@dataclass(frozen=True)
class Problem:
    """What has to be scheduled: a chain of stages, each of which feeds the next.

    Attributes:
        stage_ranks: the rank of each stage.
        microbatches: how many a step has.
        forward_s: for each stage, seconds of F, with what its rank does for the messages.
        input_s: for each stage, seconds of I, likewise.
        weight_s: for each stage, seconds of W.
        down_s: for each stage, seconds that its output travels to the next stage.
        up_s: for each stage, seconds that the gradient of its input travels to the stage before.
        kept: for each stage, what F takes of the rank's memory.
        kept_for_weight: for each stage, what I leaves to W.
        capacity: for each rank, how much memory there is for that.
        whole_s: for each stage, seconds of B; those of I and W together where they are not given.
        forward_extra: for each stage, what F needs beyond `kept` while it runs.
        input_extra: for each stage, what I needs beyond what is kept while it runs.
        backward_extra: the same for B.
        weight_extra: for each stage, what W needs beyond what is kept while it runs.
    """

    stage_ranks: tuple[int, ...]
    microbatches: int
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    kept: tuple[float, ...]
    kept_for_weight: tuple[float, ...]
    capacity: tuple[float, ...]
    whole_s: tuple[float, ...] = ()
    forward_extra: tuple[float, ...] = ()
    input_extra: tuple[float, ...] = ()
    backward_extra: tuple[float, ...] = ()
    weight_extra: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # What is not given is filled in here, once, since millions of passes look it up.
        if not self.whole_s:
            both = zip(self.input_s, self.weight_s, strict=True)
            object.__setattr__(self, "whole_s", tuple(one + other for one, other in both))
        for what in ("forward_extra", "input_extra", "backward_extra", "weight_extra"):
            if not getattr(self, what):
                object.__setattr__(self, what, (0,) * self.stages)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.stage_ranks)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.capacity)

    @property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """For F, I, W and B, by stage."""
        return self.forward_s, self.input_s, self.weight_s, self.whole_s

    @cached_property
    def hops(self) -> tuple[tuple[Hop, ...], ...]:
        """For F, I, W and B, by stage."""
        microbatches, ranks, last = self.microbatches, self.stage_ranks, self.stages - 1
        backward = self.stages * microbatches
        nobody = 2 * backward
        hops: tuple[list[Hop], ...] = ([], [], [], [])
        for stage, rank in enumerate(ranks):
            unused = nobody - stage * microbatches
            if stage == last:
                hops[0].append(Hop(self.forward_s[stage], 0, backward, 0.0, -1))
            else:
                there = ranks[stage + 1]
                stays = there == rank
                down_s = 0.0 if stays else self.down_s[stage]
                hops[0].append(Hop(self.forward_s[stage], 0, microbatches, down_s, -1 if stays else there))
            gives, travel_s, there = unused, 0.0, -1
            if stage:
                gives = backward - microbatches
                if ranks[stage - 1] != rank:
                    travel_s, there = self.up_s[stage], ranks[stage - 1]
            for kind, seconds in ((1, self.input_s), (3, self.whole_s)):
                hops[kind].append(Hop(seconds[stage], backward, gives, travel_s, there))
            hops[2].append(Hop(self.weight_s[stage], unused + microbatches, unused, 0.0, -1))
        return tuple(map(tuple, hops))

    @cached_property
    def receivers(self) -> tuple[frozenset[int], ...]:
        """For each rank, the ranks that it sends to."""
        receivers: list[set[int]] = [set() for _ in range(self.ranks)]
        for here, there in pairwise(self.stage_ranks):
            if here != there:
                receivers[here].add(there)
                receivers[there].add(here)
        return tuple(map(frozenset, receivers))

    @cached_property
    def memory_tables(self) -> tuple[tuple[Sequence[float], ...], tuple[Sequence[float], ...]]:
        """For F, I, W and B, by stage: what it takes beyond what is kept while it runs, and what is kept
        after it and was not before.
        """
        kept, left = self.kept, self.kept_for_weight
        both = zip(kept, self.forward_extra, strict=True)
        during = (
            tuple(one + other for one, other in both),
            self.input_extra,
            self.weight_extra,
            self.backward_extra,
        )
        after = (
            kept,
            tuple(one - other for one, other in zip(left, kept, strict=True)),
            tuple(-one for one in left),
            tuple(-one for one in kept),
        )
        return during, after

    def work_s(self) -> list[float]:
        """For each rank, the seconds that it computes."""
        work = [0.0] * self.ranks
        for stage, rank in enumerate(self.stage_ranks):
            seconds = self.forward_s[stage] + self.input_s[stage] + self.weight_s[stage]
            work[rank] += self.microbatches * seconds
        return work

    def start_s(self) -> list[float]:
        """For each stage, when its first F can start at the earliest."""
        starts = [0.0]
        for stage in range(self.stages - 1):
            starts.append(starts[-1] + self.forward_s[stage] + self.down_s[stage])
        return starts


def scheduling_problem(
    costs: Sequence[StageCost], stage_ranks: tuple[int, ...], microbatches: int, cluster: Cluster
) -> Problem:
    """The problem of stages on a cluster, with the speed, the links and the memory of each rank.

    The capacity of a rank without a limit is infinite, and that of one whose parameters alone are too much
    is negative.
    """
    # What the ranks have: links, speeds, and the memory that parameters leave.
    down, up = travel_s(costs, stage_ranks, cluster)
    speeds = [cluster.speed(rank) for rank in stage_ranks]
    capacity: list[float] = []
    for rank in range(max(stage_ranks) + 1):
        limit = cluster.memory(rank)
        capacity.append(math.inf if limit is None else limit)
    for rank, cost in zip(stage_ranks, costs, strict=True):
        capacity[rank] -= cost.static_bytes

    # What a pass takes beside its own computing: messages held, and handled.
    beside = _most_messages(costs, stage_ranks)
    down_work, up_work = _handling_s(costs, stage_ranks, cluster)

    def seconds(kind: ActionKind) -> tuple[float, ...]:
        work = down_work if kind is ActionKind.F else up_work
        return tuple(
            cost.seconds(kind) / speed + (0.0 if kind is ActionKind.W else handling_s)
            for cost, speed, handling_s in zip(costs, speeds, work, strict=True)
        )

    def extra(kind: ActionKind) -> tuple[int, ...]:
        return tuple(cost.bytes_during(kind) + size for cost, size in zip(costs, beside, strict=True))

    return Problem(
        stage_ranks,
        microbatches,
        forward_s=seconds(ActionKind.F),
        input_s=seconds(ActionKind.I),
        weight_s=seconds(ActionKind.W),
        down_s=down,
        up_s=up,
        kept=tuple(cost.activation_bytes for cost in costs),
        kept_for_weight=tuple(cost.weight_bytes for cost in costs),
        capacity=tuple(capacity),
        whole_s=seconds(ActionKind.B),
        forward_extra=tuple(
            cost.forward_workspace_bytes + size for cost, size in zip(costs, beside, strict=True)
        ),
        input_extra=extra(ActionKind.I),
        backward_extra=extra(ActionKind.B),
        weight_extra=extra(ActionKind.W),
    )


def _most_messages(costs: Sequence[StageCost], stage_ranks: Sequence[int]) -> list[int]:
    """For each stage, about what lies on its rank for messages: two that come, two gradients that were sent.
    How many there are depends on the order of all passes (`messages_beside`).
    """
    most = [0] * (max(stage_ranks) + 1)
    for rank in range(len(most)):
        own = [cost for cost, at in zip(costs, stage_ranks, strict=True) if at == rank]
        arriving = max((max(it.arriving_bytes, it.arriving_gradient_bytes) for it in own), default=0)
        most[rank] = 2 * arriving + 2 * max((it.returned_gradient_bytes for it in own), default=0)
    return [most[rank] for rank in stage_ranks]


def travel_s(
    costs: Sequence[StageCost], stage_ranks: tuple[int, ...], cluster: Cluster
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage, the seconds of the message to the next stage and of the one to the stage before."""
    down, up = [0.0] * len(costs), [0.0] * len(costs)
    values, gradients = sent_along(costs)
    for (stage, here), (after, there) in pairwise(enumerate(stage_ranks)):
        if here != there:
            down[stage] = cluster.transfer_s(values.get((stage, after), 0), here, there)
            up[after] = cluster.transfer_s(gradients.get((after, stage), 0), there, here)
    return tuple(down), tuple(up)


def _handling_s(
    costs: Sequence[StageCost], stage_ranks: tuple[int, ...], cluster: Cluster
) -> tuple[list[float], list[float]]:
    """For each stage, for how long its rank works for the messages of F, and for those of B or I."""
    works: tuple[list[float], list[float]] = ([0.0] * len(costs), [0.0] * len(costs))
    for work, sizes in zip(works, sent_along(costs), strict=True):
        for ends, size in sizes.items():
            seconds = cluster.handling_s(size, *(stage_ranks[end] for end in ends))
            for end in ends:
                work[end] += seconds
    return works
