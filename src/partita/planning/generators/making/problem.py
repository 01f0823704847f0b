"""What a schedule is made for: the times of each stage's passes, of messages, and the memory of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules.actions import ActionKind

__all__ = ["Problem", "scheduling_problem", "travel_s"]


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
    down, up = travel_s(costs, stage_ranks, cluster)
    speeds = [cluster.speed(rank) for rank in stage_ranks]
    capacity: list[float] = []
    for rank in range(max(stage_ranks) + 1):
        limit = cluster.memory(rank)
        capacity.append(math.inf if limit is None else limit)
    for rank, cost in zip(stage_ranks, costs, strict=True):
        capacity[rank] -= cost.static_bytes

    down_work, up_work = _handling_s(costs, stage_ranks, cluster)

    def seconds(kind: ActionKind) -> tuple[float, ...]:
        work = down_work if kind is ActionKind.F else up_work
        return tuple(
            cost.seconds(kind) / speed + (0.0 if kind is ActionKind.W else handling_s)
            for cost, speed, handling_s in zip(costs, speeds, work, strict=True)
        )

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
        forward_extra=tuple(cost.forward_workspace_bytes for cost in costs),
        input_extra=tuple(cost.bytes_during(ActionKind.I) for cost in costs),
        backward_extra=tuple(cost.bytes_during(ActionKind.B) for cost in costs),
        weight_extra=tuple(cost.bytes_during(ActionKind.W) for cost in costs),
    )


def travel_s(
    costs: Sequence[StageCost], stage_ranks: tuple[int, ...], cluster: Cluster
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage, the seconds of the message to the next stage and of the one to the stage before."""
    down, up = [0.0] * len(costs), [0.0] * len(costs)
    for (stage, here), (after, there) in pairwise(enumerate(stage_ranks)):
        if here != there:
            down[stage] = cluster.transfer_s(costs[stage].send_bytes, here, there)
            up[after] = cluster.transfer_s(costs[after].gradient_bytes(costs[stage]), there, here)
    return tuple(down), tuple(up)


def _handling_s(
    costs: Sequence[StageCost], stage_ranks: tuple[int, ...], cluster: Cluster
) -> tuple[list[float], list[float]]:
    """For each stage, for how long its rank works for the messages of F, and for those of B or I."""
    down, up = [0.0] * len(costs), [0.0] * len(costs)
    for (stage, here), (after, there) in pairwise(enumerate(stage_ranks)):
        down_s = cluster.handling_s(costs[stage].send_bytes, here, there)
        up_s = cluster.handling_s(costs[after].gradient_bytes(costs[stage]), there, here)
        for end in (stage, after):
            down[end] += down_s
            up[end] += up_s
    return down, up
