"""One combination that a search tries: a layout, cuts, what is recomputed, and an order of passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.recompute import Regions, recompute_options, recomputed_cost
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.spanning import NOTHING_SHARED, SharedOnRank
from partita.planning.costs.stage_cost import StageCost
from partita.planning.costs.tied_gradients import summed_gradients, tied_messages
from partita.planning.cutting._cuts import Cuts
from partita.planning.generators.making.problem import Problem, scheduling_problem
from partita.planning.hardware.cluster import Cluster
from partita.planning.searching.layouts import Layout
from partita.planning.searching.orders.beside import Beside, RowsInMemory
from partita.planning.searching.orders.clock import Pass, Rows, has_backward
from partita.planning.searching.orders.fixed_order import FixedOrders
from partita.planning.searching.orders.improve import lower_bound_s
from partita.planning.searching.orders.row_memory import RowKinds, peak_of, row_kinds
from partita.planning.searching.orders.rows_memo import RowsMemo
from partita.planning.simulating.gradient_sums import gradient_sums
from partita.planning.simulating.message_sizes import (
    MessageSizes,
    handed_on_ranks,
    message_sizes,
)
from partita.planning.simulating.messages import Link, PlacedPass, messages_beside

__all__ = ["Case", "Trial"]

_ROUNDED = 1e-9
"""Times that differ by no more may be equal in a `Trial.key`."""
_Fitted = tuple[tuple[Regions, ...], list[float]]


@dataclass(frozen=True)
class Trial:
    """What is tried, and what came of it.

    Attributes:
        name: of the schedule.
        layout: which rank has which stage.
        cuts: the places of all borders, ends included.
        regions: for each stage, what it recomputes.
        rows: for each rank its passes.
        end_s: when the step ends, sums of tied parameters' gradients included; infinite where it never does.
        total_s: the ends of all ranks added up.
        over: for each rank, by how many bytes its memory is exceeded; 0 or less where it fits.
    """

    name: str
    layout: Layout
    cuts: Cuts
    regions: tuple[Regions, ...]
    rows: Rows
    end_s: float
    total_s: float
    over: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether no rank exceeds its memory."""
        return max(self.over) <= 0

    @property
    def trains(self) -> bool:
        """Whether its rows have backward passes."""
        return any(map(has_backward, self.rows))

    @property
    def key(self) -> tuple[float, float, float]:
        """The smaller, the better: first what exceeds the memory, then time."""
        return max(*self.over, 0.0), float(f"{self.end_s:.10g}"), self.total_s


class Case:
    """What is to be planned. Costs of stages are worked out once."""

    def __init__(
        self, costs: CostModel, cluster: Cluster, microbatches: int, parameter_copies: float, recompute: bool
    ) -> None:
        self.costs = costs
        self.cluster = cluster
        self.microbatches = microbatches
        self.parameter_copies = parameter_copies
        self.recompute = recompute
        self._stages: dict[tuple[int, int, Regions, SharedOnRank], StageCost] = {}
        self._options: dict[tuple[int, int], list[Regions]] = {}
        self._placed: dict[Pass, PlacedPass] = {}
        self._in_memory = RowsMemo[RowsInMemory]()
        self._ends_s = RowsMemo[tuple[float, float]]()
        self._orders = FixedOrders()
        self._peaks = RowsMemo[list[dict[tuple[object, ...], int]]]()
        self._limits = [cluster.memory(rank) for rank in range(cluster.ranks)]
        self._sends_tied = any(tied.gradient_bytes for tied in costs.tied)
        self._sums_tied = any(tied.reduced_bytes for tied in costs.tied)

    def changed(
        self,
        *,
        cluster: Cluster | None = None,
        microbatches: int | None = None,
        parameter_copies: float | None = None,
        recompute: bool | None = None,
        costs: CostModel | None = None,
    ) -> Case:
        """The same with some of it changed; costs that this leaves alone are not worked out again."""
        case = Case(
            self.costs if costs is None else costs,
            self.cluster if cluster is None else cluster,
            self.microbatches if microbatches is None else microbatches,
            self.parameter_copies if parameter_copies is None else parameter_copies,
            self.recompute if recompute is None else recompute,
        )
        if costs is None and case.parameter_copies == self.parameter_copies:
            case._stages = self._stages
        if case.microbatches == self.microbatches:
            case._placed, case._in_memory = self._placed, self._in_memory
            case._orders = self._orders
            if case._stages is self._stages and cluster is None:
                case._ends_s, case._peaks = self._ends_s, self._peaks
        if costs is None and case.recompute == self.recompute:
            case._options = self._options
        return case

    @property
    def is_limited(self) -> bool:
        """Whether any rank has a limit of memory."""
        return any(limit is not None for limit in self._limits)

    def stage(
        self, start: int, end: int, regions: Regions = (), shared: SharedOnRank = NOTHING_SHARED
    ) -> StageCost:
        """The cost of the stage between two places."""
        key = (start, end, regions, shared)
        cost = self._stages.get(key)
        if cost is None:
            cost = self._stages[key] = self._worked_out(start, end, regions, shared)
        return cost

    def _worked_out(self, start: int, end: int, regions: Regions, shared: SharedOnRank) -> StageCost:
        # Whom it hands things to depends on all cuts, and changes nothing else.
        alone = shared._replace(handed_gradients=(), sent_values=None)
        if shared != alone:
            handed = (shared.handed_gradients, shared.sent_values)
            cost = self.stage(start, end, regions, alone)
            if self.costs.entry_bytes is None:
                return cost
            return replace(cost, handed_gradients=handed[0], sent_values=handed[1])
        whole = self.stage(start, end, (), shared) if regions and not shared.entering_bytes else None
        return recomputed_cost(
            self.costs,
            start,
            end - 1,
            regions,
            self.parameter_copies,
            shared=shared,
            whole=whole,
        )

    def options(self, start: int, end: int) -> list[Regions]:
        """What the stage between two places may recompute, nothing included."""
        options = self._options.get((start, end))
        if options is None:
            options = list(recompute_options(self.costs, start, end - 1)) if self.recompute else [()]
            self._options[start, end] = options
        return options

    def stages(self, layout: Layout, cuts: Cuts, regions: Sequence[Regions] | None = None) -> list[StageCost]:
        """The cost of each stage."""
        chosen = regions or ((),) * (len(cuts) - 1)
        rows = zip(pairwise(cuts), chosen, self.shared(layout, cuts), strict=True)
        return [self.stage(*ends, again, shared) for ends, again, shared in rows]

    def shared(self, layout: Layout, cuts: Cuts) -> Sequence[SharedOnRank]:
        """What the stages of a rank hand to each other, for each stage."""
        if not layout.has_shared_ranks and not self.costs.spanning:
            return (NOTHING_SHARED,) * (len(cuts) - 1)
        return shared_on_rank(self.costs, cuts, layout.own)

    def problem(self, layout: Layout, cuts: Cuts, regions: Sequence[Regions] | None = None) -> Problem:
        """What has to be scheduled."""
        stages = self.stages(layout, cuts, regions)
        return scheduling_problem(stages, layout.stage_ranks, self.microbatches, self.cluster)

    def timed(
        self, name: str, layout: Layout, cuts: Cuts, rows: Rows, regions: tuple[Regions, ...] | None = None
    ) -> Trial:
        """The trial of these rows; where they exceed the memory, as little as will do is recomputed."""
        return self._timed(name, layout, cuts, rows, self._fitted(layout, cuts, rows, regions))

    def timed_if_it_fits(
        self, name: str, layout: Layout, cuts: Cuts, rows: Rows, regions: tuple[Regions, ...] | None = None
    ) -> Trial | None:
        """The same; None, and nothing is timed, where even so the memory is exceeded."""
        fitted = self._fitted(layout, cuts, rows, regions)
        return None if max(fitted[1]) > 0 else self._timed(name, layout, cuts, rows, fitted)

    def _timed(self, name: str, layout: Layout, cuts: Cuts, rows: Rows, fitted: _Fitted) -> Trial:
        regions, over = fitted
        end_s, total_s = self._ends(layout, cuts, regions, rows)
        return Trial(name, layout, cuts, regions, rows, end_s, total_s, tuple(over))

    def better(self, trial: Trial, cuts: Cuts) -> Trial | None:
        """The same order on other cuts with nothing recomputed that does not have to be; None where that is
        no better.
        """
        layout, rows = trial.layout, trial.rows
        if trial.fits:
            # To recompute takes longer: what is slower without needs no look at its memory.
            problem, most_s = self.problem(layout, cuts), trial.end_s * (1 + _ROUNDED)
            if lower_bound_s(problem, trains=trial.trains) > most_s:
                return None
            nothing: tuple[Regions, ...] = ((),) * (len(cuts) - 1)
            if self._ends(layout, cuts, nothing, rows, problem)[0] > most_s:
                return None
        # What exceeds the memory by more is not better, however fast it is.
        fitted = self._fitted(layout, cuts, rows)
        if max(fitted[1]) > max(*trial.over, 0.0):
            return None
        result = self._timed(trial.name, layout, cuts, rows, fitted)
        return result if result.key < trial.key else None

    def _fitted(
        self, layout: Layout, cuts: Cuts, rows: Rows, regions: tuple[Regions, ...] | None = None
    ) -> _Fitted:
        """What is recomputed, as little more than `regions` as will do, and what still exceeds the memory."""
        chosen: tuple[Regions, ...] = ((),) * (len(cuts) - 1) if regions is None else regions
        over = self._overflow(layout, cuts, chosen, rows)
        if max(over) > 0 and self.recompute:
            chosen = self._regions_that_fit(layout, cuts, rows, chosen, over)
            over = self._overflow(layout, cuts, chosen, rows)
        return chosen, over

    def _ends(
        self,
        layout: Layout,
        cuts: Cuts,
        regions: tuple[Regions, ...],
        rows: Rows,
        problem: Problem | None = None,
    ) -> tuple[float, float]:
        """`Trial.end_s` and `Trial.total_s`."""
        remembered, key = self._ends_s.of(rows), (layout, cuts, regions)
        if key not in remembered:
            problem = problem or self.problem(layout, cuts, regions)
            ends = self._orders.ends(problem, rows, again=bool(remembered))
            end_s, total_s = (inf, inf) if ends is None else (max(ends), sum(ends))
            if ends is not None and self._sums_tied:
                end_s = self._end_of_sums(layout, cuts, rows, ends)
            remembered[key] = end_s, total_s
        return remembered[key]

    def _end_of_sums(self, layout: Layout, cuts: Cuts, rows: Rows, ends: Sequence[float]) -> float:
        of_rows = [[end] if row else [] for row, end in zip(rows, ends, strict=True)]
        after = gradient_sums(summed_gradients(self.costs, cuts), layout.stage_ranks, self.cluster, of_rows)
        return max([*ends, *(one.end_s for one in after)])

    def _overflow(self, layout: Layout, cuts: Cuts, regions: Sequence[Regions], rows: Rows) -> list[float]:
        """For each rank, by how many bytes it exceeds its memory."""
        if not self.is_limited:
            return [0.0] * len(rows)
        peaks = zip(self._limits, self.peaks(layout, cuts, regions, rows), strict=False)
        return [-inf if limit is None else peak - limit for limit, peak in peaks]

    def _rows_in_memory(self, layout: Layout, rows: Rows, links: Collection[Link]) -> RowsInMemory:
        """What stays the same while rows are tried with other costs again: remembered."""
        remembered, key = self._in_memory.of(rows), (layout.stage_ranks, frozenset(links))
        if key not in remembered:
            placed = [[self._placed.get(one) or self._place(one) for one in row] for row in rows]
            messages = messages_beside(placed, layout.stage_ranks, links)
            remembered[key] = RowsInMemory(placed, list(map(row_kinds, rows)), messages)
        return remembered[key]

    def _place(self, one: Pass) -> PlacedPass:
        """The pass with its microbatch in place of its number."""
        kind, stage, number = one
        placed = self._placed[one] = kind, stage, number % self.microbatches
        return placed

    def _beside(self, layout: Layout, cuts: Cuts, stages: Sequence[StageCost], rows: Rows) -> Beside:
        """For each rank its passes, and what lies there for messages and between stages beside them."""
        # Without messages nothing depends on the order of passes that a `Problem` does not know.
        if self.costs.entry_bytes is None and not self._sends_tied:
            return Beside(self._rows_in_memory(layout, rows, ()), MessageSizes({}, {}), [[] for _ in rows])
        handing = self._handing(cuts, stages)
        sizes = message_sizes(handing, layout.stage_ranks)
        of_rows = self._rows_in_memory(layout, rows, sizes.coming)
        return Beside(of_rows, sizes, handed_on_ranks(handing, layout.stage_ranks))

    def _handing(self, cuts: Cuts, stages: Sequence[StageCost]) -> list[StageCost]:
        """The costs of all stages with the gradients of tied parameters that they send."""
        if not self._sends_tied:
            return list(stages)
        tied = tied_messages(self.costs, cuts)
        return [
            replace(cost, tied_gradients=to) if to else cost for cost, to in zip(stages, tied, strict=True)
        ]

    def _regions_that_fit(
        self,
        layout: Layout,
        cuts: Cuts,
        rows: Rows,
        regions: tuple[Regions, ...],
        over: Sequence[float],
        *,
        tightly: bool = False,
    ) -> tuple[Regions, ...]:
        """On each rank that holds too much, stage by stage, the cheapest option that will do.

        What one stage frees beyond that stays free for other orders, unless it is to be done `tightly`.
        """
        chosen, shared = list(regions), self.shared(layout, cuts)
        beside = self._beside(layout, cuts, self.stages(layout, cuts, regions), rows)
        for rank in (rank for rank, excess in enumerate(over) if excess > 0):
            limit = self.cluster.memory(rank)
            if limit is None:
                continue
            own = [stage for stage, at in enumerate(layout.stage_ranks) if at == rank]
            costs = {
                stage: self.stage(cuts[stage], cuts[stage + 1], chosen[stage], shared[stage]) for stage in own
            }
            excess_of = partial(
                self._excess, beside.of_rows.kinds[rank], beside=beside.bytes_on(rank), limit=limit
            )
            for stage in own:
                if not self._choose(chosen, costs, shared[stage], stage, cuts, excess_of):
                    break
            # The other way round, what was more than it takes.
            for stage in reversed(own if tightly else ()):
                if chosen[stage]:
                    self._choose(chosen, costs, shared[stage], stage, cuts, excess_of)
        return tuple(chosen)

    @staticmethod
    def _excess(row: RowKinds, costs: Mapping[int, StageCost], *, beside: Sequence[int], limit: int) -> int:
        return max(peak_of(row, costs, beside) - limit, 0)

    def _choose(
        self,
        chosen: list[Regions],
        costs: dict[int, StageCost],
        shared: SharedOnRank,
        stage: int,
        cuts: Cuts,
        excess_of: Callable[[Mapping[int, StageCost]], int],
    ) -> float:
        """Change what a stage recomputes to the cheapest that fits; the bytes that are still too many."""
        ends, least = (cuts[stage], cuts[stage + 1]), inf
        rated = ((self.stage(*ends, option, shared).recompute_s, option) for option in self.options(*ends))
        for _, option in sorted(rated):
            costs[stage] = self.stage(*ends, option, shared)
            excess = excess_of(costs)
            if excess < least:
                least, chosen[stage] = excess, option
            if not excess:
                break  # the others take longer
        costs[stage] = self.stage(*ends, chosen[stage], shared)
        return least

    def relaxed(self, trial: Trial) -> Trial:
        """The same order with nothing recomputed that does not have to be, where that is faster."""
        if not any(trial.regions) or not trial.fits:
            return trial
        everywhere = (1.0,) * len(trial.rows)
        regions = self._regions_that_fit(
            trial.layout, trial.cuts, trial.rows, trial.regions, everywhere, tightly=True
        )
        if regions == trial.regions:
            return trial
        result = self.timed(trial.name, trial.layout, trial.cuts, trial.rows, regions)
        return min(trial, result, key=lambda one: one.key)

    def peaks(self, layout: Layout, cuts: Cuts, regions: Sequence[Regions], rows: Rows) -> tuple[int, ...]:
        """For each rank, the most bytes that it holds."""
        of_stages = self.stages(layout, cuts, regions)
        costs = [dict[int, StageCost]() for _ in rows]
        for stage, rank in enumerate(layout.stage_ranks):
            costs[rank][stage] = of_stages[stage]
        beside = self._beside(layout, cuts, of_stages, rows)
        # A border that moves changes two ranks; of the others it is remembered.
        by_rank = self._peaks.of(rows).setdefault(
            (layout.stage_ranks, frozenset(beside.sizes.coming)), [{} for _ in rows]
        )
        peaks: list[int] = []
        for rank, (own, remembered) in enumerate(zip(costs, by_rank, strict=True)):
            key = (*map(id, own.values()), beside.key_of(rank))  # all costs are kept in `_stages`
            if key not in remembered:
                remembered[key] = peak_of(beside.of_rows.kinds[rank], own, beside.bytes_on(rank))
            peaks.append(remembered[key])
        return tuple(peaks)
