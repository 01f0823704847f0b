"""The schedules by name, and what the planner must know of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from partita.errors import ScheduleError
from partita.planning.costs.stage_cost import StageCost
from partita.planning.generators.forward_only import forward_only
from partita.planning.generators.gpipe import gpipe
from partita.planning.generators.interleaved_1f1b import interleaved_1f1b
from partita.planning.generators.interleaved_zero_bubble import interleaved_zero_bubble
from partita.planning.generators.looped_bfs import looped_bfs
from partita.planning.generators.one_f_one_b import one_f_one_b
from partita.planning.generators.v_shaped.dualpipe_v import dualpipe_v
from partita.planning.generators.v_shaped.v_half import v_half
from partita.planning.generators.v_shaped.v_min import v_min
from partita.planning.generators.v_shaped.zbv_zero_bubble import zbv_zero_bubble
from partita.planning.generators.zb_2p import zb_2p
from partita.planning.generators.zb_h1 import zb_h1
from partita.planning.generators.zb_h2 import zb_h2
from partita.planning.hardware.cluster import Cluster
from partita.planning.hardware.placement import loop_placement, v_placement
from partita.planning.schedules.schedule import Schedule

__all__ = ["ScheduleKind", "get_schedule", "schedule_names"]


class Generator(Protocol):
    """Makes a schedule for any numbers that it can serve, and raises ScheduleError for the others."""

    def __call__(
        self, stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
    ) -> Schedule: ...


class CostGenerator(Protocol):
    """A `Generator` that knows times, links and memory."""

    def __call__(
        self,
        stages: int,
        microbatches: int,
        ranks: int | None = None,
        placement: Sequence[int] | None = None,
        *,
        costs: Sequence[StageCost] | None = None,
        cluster: Cluster | None = None,
        memory_bytes: int | None = None,
    ) -> Schedule: ...


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of schedule. Calling it makes one: ``get_schedule("1f1b")(stages=4, microbatches=8)``.

    Attributes:
        name: as it is written in plans.
        generate: makes a schedule.
        shape: how the stages are placed: round the ranks, or down and back up ("V").
        trains: whether there is a backward pass.
        hides_transfers: whether a rank has other microbatches to work on while a message travels. 1F1B and
            its kin go round in a circle (forward to the end, back, and only then the next forward), so there
            every message counts.
        splits_backward: whether I and W stand in place of B.
        for_costs: the same as `generate` for given times, links and memory; None where the order of the
            passes does not depend on them.
    """

    name: str
    generate: Generator
    shape: Literal["loop", "V"] = "loop"
    trains: bool = True
    hides_transfers: bool = False
    splits_backward: bool = False
    for_costs: CostGenerator | None = None

    def __call__(
        self,
        stages: int,
        microbatches: int,
        ranks: int | None = None,
        placement: Sequence[int] | None = None,
        *,
        costs: Sequence[StageCost] | None = None,
        cluster: Cluster | None = None,
        memory_bytes: int | None = None,
    ) -> Schedule:
        """The schedule. `costs` (one a stage), `cluster` and `memory_bytes` (a rank's) are for the kinds that
        have `for_costs`; to the others they make no difference.
        """
        if self.for_costs is None:
            return self.generate(stages, microbatches, ranks, placement)
        return self.for_costs(
            stages, microbatches, ranks, placement, costs=costs, cluster=cluster, memory_bytes=memory_bytes
        )

    @property
    def stages_a_rank(self) -> int:
        """How many stages a rank has where nobody says: what the schedule was thought out for."""
        return 2 if self.shape == "V" or self.name in _TWO_A_RANK else 1

    def placement(self, stages: int, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return v_placement(stages, ranks) if self.shape == "V" else loop_placement(stages, ranks)


_TWO_A_RANK = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")

_KINDS = (
    ScheduleKind("ForwardOnly", forward_only, trains=False, hides_transfers=True),
    ScheduleKind("GPipe", gpipe, hides_transfers=True),
    ScheduleKind("1F1B", one_f_one_b),
    ScheduleKind("LoopedBFS", looped_bfs, hides_transfers=True),
    ScheduleKind("Interleaved1F1B", interleaved_1f1b),
    ScheduleKind("InterleavedZeroBubble", interleaved_zero_bubble, splits_backward=True),
    ScheduleKind("ZBH1", zb_h1, splits_backward=True),
    ScheduleKind("ZBH2", zb_h2, splits_backward=True),
    ScheduleKind("ZB2p", zb_2p, splits_backward=True, for_costs=zb_2p),
    ScheduleKind("ZBVZeroBubble", zbv_zero_bubble, shape="V", splits_backward=True),
    ScheduleKind("VHalf", v_half, shape="V", splits_backward=True),
    ScheduleKind("VMin", v_min, shape="V", splits_backward=True),
    ScheduleKind("DualPipeV", dualpipe_v, shape="V", splits_backward=True),
)


def schedule_names() -> tuple[str, ...]:
    """The names that `get_schedule` takes."""
    return tuple(kind.name for kind in _KINDS)


def get_schedule(name: str) -> ScheduleKind:
    """The kind of schedule called `name`, in capital or small letters.

    Raises:
        ScheduleError: there is none of that name.

    >>> get_schedule("gpipe")(stages=2, microbatches=2).actions(1)[0]
    Action(stage=1, kind=<ActionKind.F: 'F'>, microbatch=0, parts=(), peer=None)
    """
    for kind in _KINDS:
        if isinstance(name, str) and kind.name.lower() == name.lower():
            return kind
    raise ScheduleError(
        f"there is no schedule {name!r}: choose one of {', '.join(schedule_names())}, by its name; or let "
        "search() or the command partita plan make an order for the costs, a ListSchedule"
    )
