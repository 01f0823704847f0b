"""The result of planning: which units form which stage, where each stage runs, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import require_amount, require_copies, require_count, require_seconds
from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules.schedule import Schedule

__all__ = ["Change", "CutReason", "Plan", "StagePlan"]


@dataclass(frozen=True)
class StagePlan:
    """One stage: a run of neighbouring units, with their costs for one microbatch added up.

    Attributes:
        index: its place in the pipeline, from 0.
        first_unit: index of its first unit.
        last_unit: index of its last unit; the stage holds it.
        units: their names.
        modules: the qualified names of the modules in them.
        parameters: how many numbers its parameters hold.
        parameter_bytes: bytes of its parameters.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the whole backward pass.
        send_bytes: what its forward pass sends to the next stage; 0 for the last.
        send_grad_bytes: what its backward pass sends to the stage before; 0 for the first.
        activation_bytes: bytes kept from forward to backward.
        backward_input_s: seconds of the gradient of the inputs alone, where every unit has it.
        backward_weight_s: seconds of the gradient of the weights alone, where every unit has it.
        weight_activation_bytes: what of `activation_bytes` the gradient of the inputs leaves for that of the
            weights; all of it where it is not given.
        forward_workspace_bytes: what the forward pass needs at most while it runs, beyond what it keeps.
        backward_workspace_bytes: what the backward pass needs at most while it runs, beyond what is kept.
        input_workspace_bytes: what I needs at most, where that is known apart; what it catches for W counts.
        weight_workspace_bytes: what W needs at most, likewise.
        arriving_bytes: what F is sent by other ranks.
        arriving_gradient_bytes: what B or I is sent by other ranks.
        returned_gradient_bytes: what B or I sends back to other ranks.
        tied_gradients: the earlier stages that B or I sends gradients of tied parameters to, each with their
            bytes.
        handed_gradients: the earlier stages that B or I hands gradients of values to, each with their bytes;
            see `StageCost`.
        sent_values: the later stages that F hands values to, each with their bytes; None: the next alone.
        summed_gradients: the gradients that are summed with those of later stages once, after the step: the
            bytes of each, and those stages.
        recompute: regions of neighbouring units, as (first, last) by index: only what enters a region is
            kept, and the region is computed again in the backward pass. All other numbers here are those
            without recomputation.
        recomputed: what the stage costs with `recompute`, as `recomputed_cost` has worked it out; None where
            nothing is computed again.
        time_s: seconds that the stage adds to each microbatch once the pipeline is full; the largest is the
            bottleneck.
        peak_bytes: parameters with their copies, and the activations of all the microbatches in flight.
    """

    index: int
    first_unit: int
    last_unit: int
    units: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    forward_s: float
    backward_s: float
    send_bytes: int
    send_grad_bytes: int = 0
    activation_bytes: int = 0
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    weight_activation_bytes: int | None = None
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    input_workspace_bytes: int | None = None
    weight_workspace_bytes: int | None = None
    arriving_bytes: int = 0
    arriving_gradient_bytes: int = 0
    returned_gradient_bytes: int = 0
    tied_gradients: tuple[tuple[int, int], ...] = ()
    handed_gradients: tuple[tuple[int, int], ...] = ()
    summed_gradients: tuple[tuple[int, tuple[int, ...]], ...] = ()
    sent_values: tuple[tuple[int, int], ...] | None = None
    recompute: tuple[tuple[int, int], ...] = ()
    recomputed: StageCost | None = None
    time_s: float = 0.0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first_unit <= self.last_unit:
            raise PlanError(
                f"stage {self.index} goes from unit {self.first_unit} to {self.last_unit}: give first_unit 0 "
                "or more, and last_unit at least as much"
            )
        if len(self.units) != self.last_unit - self.first_unit + 1:
            raise PlanError(
                f"stage {self.index} names {len(self.units)} units, but goes from {self.first_unit} to "
                f"{self.last_unit}: name each of them once"
            )
        for what in ("forward_s", "backward_s", "time_s"):
            require_seconds(getattr(self, what), f"{what} of stage {self.index}")
        for what in (
            "parameters",
            "parameter_bytes",
            "send_bytes",
            "send_grad_bytes",
            "activation_bytes",
            "peak_bytes",
        ):
            require_amount(getattr(self, what), f"{what} of stage {self.index}")
        self._check_regions()

    def _check_regions(self) -> None:
        free = self.first_unit
        for region in self.recompute:
            if len(region) != 2 or not free <= region[0] <= region[1] <= self.last_unit:
                raise PlanError(
                    f"stage {self.index} recomputes {region}: give (first, last) within units "
                    f"{self.first_unit} to {self.last_unit}, in order and apart"
                )
            free = region[1] + 1


@dataclass(frozen=True)
class CutReason:
    """Why a cut is where it is: what the simulated step takes with it, and with the next best one.

    Attributes:
        border: the border that is cut: after the unit of this index.
        before: the name of the unit before it.
        after: the name of the unit after it.
        crossing_bytes: what one microbatch carries forward across it.
        makespan_s: seconds of the simulated step.
        next_border: the next best border for this cut, the others being where they are; None where there is
            no other that fits.
        next_before: the name of the unit before that.
        next_after: the name of the unit after that.
        next_crossing_bytes: what one microbatch would carry forward across that.
        next_makespan_s: seconds that the step would take.

    >>> print(CutReason(3, "b", "c", 10, 2.0, 2, "a", "b", 40, 2.1))
    between 'b' and 'c' (10 bytes): the step takes 2 s; cut between 'a' and 'b' (40 bytes), 2.1 s
    """

    border: int
    before: str
    after: str
    crossing_bytes: int
    makespan_s: float
    next_border: int | None = None
    next_before: str | None = None
    next_after: str | None = None
    next_crossing_bytes: int | None = None
    next_makespan_s: float | None = None

    def __str__(self) -> str:
        here = f"between {self.before!r} and {self.after!r} ({self.crossing_bytes} bytes): the step takes "
        if self.next_makespan_s is None:
            return f"{here}{self.makespan_s:.4g} s; no other place fits"
        return (
            f"{here}{self.makespan_s:.4g} s; cut between {self.next_before!r} and {self.next_after!r} "
            f"({self.next_crossing_bytes} bytes), {self.next_makespan_s:.4g} s"
        )


_COMPARED = (
    "forward_s",
    "backward_s",
    "time_s",
    "send_bytes",
    "parameter_bytes",
    "peak_bytes",
    "recompute",
)


def _passes(order: Schedule | None) -> str:
    """A few words on an order, which is too long for a table."""
    if order is None:
        return "as the schedule's name says"
    return f"{sum(map(len, order.rows))} passes of its own"


@dataclass(frozen=True)
class Change:
    """One thing in which two plans differ: what it is, its value in the first plan and in the second."""

    what: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Plan:
    """Which stages a model is cut into, the rank of each, and the schedule that they were planned for.

    Attributes:
        stages: in pipeline order; together they hold every unit once.
        placement: the rank of each stage.
        schedule: the name of the schedule, as `get_schedule` takes it; any other text where there is an
            `order`.
        microbatches: how many a step has.
        bottleneck_s: the largest `time_s`.
        parameter_copies: what each byte of parameters costs in memory, gradients and optimizer included.
        cluster: what the plan was made for; None where links and memory were left out of account.
        order: what every rank does, where the name of the schedule does not say; `schedule_of` gives it
            either way.
        cuts: why each cut is where it is, in order; empty where that was not asked (`explain_cuts`).
        tied_gradients: what its schedule does with gradients of tied parameters, as `PipelineSchedule` takes
            it: ``exact`` or ``reduced``.

    Raises:
        PlanError: stages that leave a gap or overlap, or a placement or an order that does not fit them.
    """

    stages: tuple[StagePlan, ...]
    placement: tuple[int, ...]
    schedule: str
    microbatches: int
    bottleneck_s: float
    parameter_copies: float = 1.0
    cluster: Cluster | None = None
    order: Schedule | None = None
    cuts: tuple[CutReason, ...] = ()
    tied_gradients: str = "exact"

    def __post_init__(self) -> None:
        require_count(len(self.stages), "the number of stages")
        require_count(self.microbatches, "microbatches")
        require_seconds(self.bottleneck_s, "bottleneck_s")
        require_copies(self.parameter_copies, "parameter_copies")
        if self.tied_gradients not in ("exact", "reduced"):
            raise PlanError(f"tied_gradients is {self.tied_gradients!r:.40}: give exact or reduced")
        expected_unit = 0
        for index, stage in enumerate(self.stages):
            if stage.index != index:
                raise PlanError(f"stage {stage.index} stands at place {index}: list the stages in order")
            if stage.first_unit != expected_unit:
                raise PlanError(
                    f"stage {index} starts at unit {stage.first_unit}: the stage before ends before "
                    f"{expected_unit}"
                )
            expected_unit = stage.last_unit + 1
        if len(self.placement) != len(self.stages):
            raise PlanError(
                f"placement has {len(self.placement)} ranks for {len(self.stages)} stages: give one a stage"
            )
        for rank in self.placement:
            require_amount(rank, "a rank in placement")
        for stage in self.stages:
            self._check_others_of(stage)
        self._check_order()

    def _check_others_of(self, stage: StagePlan) -> None:
        later = {"sent_values": stage.sent_values or ()}
        earlier = {"tied_gradients": stage.tied_gradients, "handed_gradients": stage.handed_gradients}
        for what, pairs in (later | earlier).items():
            numbers = range(stage.index + 1, len(self.stages)) if what in later else range(stage.index)
            for to, _ in pairs:
                if to not in numbers:
                    raise PlanError(
                        f"{what} of stage {stage.index} names stage {to}, of {len(self.stages)}: give "
                        f"{'later' if what in later else 'earlier'} ones, or save the plan again"
                    )

    def _check_order(self) -> None:
        if self.order is None:
            return
        if self.order.stage_ranks != self.placement:
            raise PlanError(
                f"the order has its stages on ranks {self.order.stage_ranks}, the placement on "
                f"{self.placement}: give the two alike"
            )
        if self.order.microbatches != self.microbatches:
            raise PlanError(
                f"the order has {self.order.microbatches} microbatches, the plan {self.microbatches}: give "
                "the two alike"
            )

    @property
    def ranks(self) -> int:
        """How many ranks the plan uses."""
        return max(self.placement) + 1

    @property
    def crossing_bytes(self) -> int:
        """Bytes that one microbatch carries forward from stage to stage, all cuts together."""
        return sum(stage.send_bytes for stage in self.stages)

    def stage_of(self) -> dict[str, int]:
        """The stage of every unit, by the unit's name."""
        return {name: stage.index for stage in self.stages for name in stage.units}

    def rows(self) -> list[dict[str, object]]:
        """One dictionary a stage, in the order that a table shows: names to plain values (SI units)."""
        return [
            {
                "stage": stage.index,
                "rank": rank,
                "units": f"{stage.first_unit}-{stage.last_unit}",
                "modules": stage.modules,
                "parameters": stage.parameters,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "time_s": stage.time_s,
                "send_bytes": stage.send_bytes,
                "peak_bytes": stage.peak_bytes,
                "recompute": ", ".join(f"{first}-{last}" for first, last in stage.recompute),
            }
            for stage, rank in zip(self.stages, self.placement, strict=True)
        ]

    def difference(self, other: Plan) -> tuple[Change, ...]:
        """What changes from this plan to `other`: settings, units that move, ranks of stages, costs.

        Empty where the plans are equal.
        """
        return tuple(self._changes(other))

    def _changes(self, other: Plan) -> Iterator[Change]:
        for what in ("schedule", "microbatches", "parameter_copies", "tied_gradients", "cluster"):
            if getattr(self, what) != getattr(other, what):
                yield Change(what, getattr(self, what), getattr(other, what))
        if self.order != other.order:
            yield Change("order", _passes(self.order), _passes(other.order))
        if len(self.stages) != len(other.stages):
            yield Change("stages", len(self.stages), len(other.stages))
        before, after = self.stage_of(), other.stage_of()
        for unit in [*before, *(name for name in after if name not in before)]:
            if before.get(unit) != after.get(unit):
                yield Change(f"stage of unit {unit}", before.get(unit), after.get(unit))
        for index, (old, new) in enumerate(zip(self.placement, other.placement, strict=False)):
            if old != new:
                yield Change(f"rank of stage {index}", old, new)
        for old_stage, new_stage in zip(self.stages, other.stages, strict=False):
            for what in _COMPARED:
                if getattr(old_stage, what) != getattr(new_stage, what):
                    yield Change(
                        f"{what} of stage {old_stage.index}",
                        getattr(old_stage, what),
                        getattr(new_stage, what),
                    )
        if self.bottleneck_s != other.bottleneck_s:
            yield Change("bottleneck_s", self.bottleneck_s, other.bottleneck_s)

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal plan."""
        return _json.write(self, "partita.plan")

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.plan")
