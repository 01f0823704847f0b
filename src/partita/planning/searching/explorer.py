"""What a search tries on one layout after the other, and the best of each kind that it has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random

from partita.errors import ScheduleError
from partita.planning.costs.recompute import Regions
from partita.planning.cutting._cuts import Cuts
from partita.planning.generators.registry import ScheduleKind
from partita.planning.schedules.schedule import Schedule
from partita.planning.searching.cuts.balance import all_cuts, cut_moves
from partita.planning.searching.cuts.cut_choices import CutChoices
from partita.planning.searching.cuts.equal_trials import equal_trial
from partita.planning.searching.layouts import Layout, rearranged, swapped
from partita.planning.searching.orders.clock import Rows, one_by_one, rows_of
from partita.planning.searching.orders.improve import Budget
from partita.planning.searching.orders.list_schedule import best_order, first_order
from partita.planning.searching.trial import Case, Trial

__all__ = ["FINALISTS", "LIST", "Explorer", "moving_budget"]

LIST = "ListSchedule"
"""The name of an order that the search has made itself."""
_MOST_CUTS = 300
FINALISTS = 4
_MOST_MOVES, _MOST_PASSES_MOVED = 1_600, 2_000_000
"""So often borders are moved for one schedule alone, and so many passes timed for that."""
_SAME = 1e-6
_EQUAL_PASSES = 1_000_000
"""So many passes may be timed to make stages equal."""
_LARGE = 2_000
"""Steps with more passes get fewer schedules that know costs: each takes as long as 48 timings."""


class Explorer:
    """Keeps the best trial of each schedule on each shape of layout."""

    def __init__(self, case: Case, budget: Budget, *, trains: bool = True) -> None:
        self._case = case
        self._trains = trains
        self._budget = budget
        self._named: dict[tuple[str, tuple[int, ...]], tuple[Schedule, Rows] | None] = {}
        self._choices = CutChoices(case, trains=trains)
        self._firsts: list[Trial] = []
        self._starts: dict[tuple[str, Layout], list[Trial]] = {}
        self._tried: dict[tuple[Layout, bool], list[tuple[Rows, list[Trial]]]] = {}
        self.refused: dict[str, str] = {}
        self.best: dict[tuple[str, str, int], Trial] = {}

    def for_case(self, case: Case, budget: Budget) -> Explorer:
        """Another one, for the same numbers of stages and microbatches: the schedules by name are shared."""
        other = Explorer(case, budget, trains=self._trains)
        other._named = self._named
        return other

    def keep(self, trial: Trial) -> None:
        """Remember the trial where it is the best of its kind."""
        key = (trial.name, trial.layout.shape, len(trial.cuts))
        best = self.best.get(key)
        if best is None or trial.key < best.key:
            self.best[key] = trial

    def ranked(self) -> list[Trial]:
        """The best of each kind, best first."""
        return sorted(self.best.values(), key=lambda trial: (*trial.key, len(trial.cuts), trial.name))

    def with_equal_stages(self, trials: Sequence[Trial], most_s: float) -> list[Trial]:
        """For each trial one of which fewer stages differ, where the step takes no longer than that; else the
        trial.
        """
        budget, changed = Budget(_EQUAL_PASSES), []
        for number, trial in enumerate(trials):
            if trial.end_s <= most_s:
                problem = self._choices.problem(True, (1,) * (len(trial.cuts) - 1), every_place=True)
                share = budget.share(1 / (len(trials) - number))
                trial = equal_trial(self._case, trial, problem, most_s, share)
            changed.append(trial)
        return changed

    def try_named(self, kind: ScheduleKind, layout: Layout) -> None:
        """A named schedule with each of the cuts that suit it."""
        if kind.shape != layout.shape:
            return
        if kind.for_costs is not None:
            starts = list(self._for_costs(kind, layout))
        else:
            starts = [replace(trial, name=kind.name) for trial in self._by_name(kind, layout)]
        self._starts[kind.name, layout] = starts
        for trial in starts:
            self.keep(trial)

    def _by_name(self, kind: ScheduleKind, layout: Layout) -> list[Trial]:
        """The trials of the kind's schedule; those of another name that means the same are taken."""
        named = self._schedule(kind, layout)
        if named is None:
            return []
        schedule, rows = named
        tried = self._tried.setdefault((layout, kind.hides_transfers), [])
        trials = next((trials for other_rows, trials in tried if other_rows == rows), None)
        if trials is None:
            chosen = dict.fromkeys(self._choices.for_schedule(kind, layout, schedule))
            trials = [self._case.timed(kind.name, layout, cuts, rows) for cuts in chosen]
            tried.append((rows, trials))
        return trials

    def move_named_cuts(self, share: float = 1.0, finalists: int = FINALISTS) -> None:
        """Move the borders of the named schedules that are nearest to the best; their orders stay.

        Args:
            share: of the budget.
            finalists: how many of them.
        """
        named = [trial for trial in self.ranked() if trial.name != LIST][:finalists]
        budget = self._budget.share(share)
        for index, trial in enumerate(named):
            own = budget.share(1 / (len(named) - index))
            starts = sorted(self._starts.get((trial.name, trial.layout), []), key=lambda one: one.key)
            for start in (trial, *(one for one in starts if one.cuts != trial.cuts)):
                if not own.is_spent:
                    self.keep(self._moved(start, own))

    def try_list(self, layout: Layout) -> None:
        """One quick list schedule on each of the cuts that suit a layout."""
        orders = [
            (order, cuts, regions)
            for cuts, regions in self._list_cuts(layout)
            if (order := first_order(self._case.problem(layout, cuts, regions))) is not None
        ]
        # What else has to be recomputed takes longer: fast ones are looked at until no other can be as fast.
        orders.sort(key=lambda one: one[0].end_s)
        firsts: list[Trial] = []
        for order, cuts, regions in orders:
            if len(firsts) >= FINALISTS and order.end_s > firsts[FINALISTS - 1].end_s * (1 + _SAME):
                break
            trial = self._case.timed_if_it_fits(LIST, layout, cuts, order.rows, regions)
            if trial is not None:
                firsts = sorted((*firsts, trial), key=lambda one: one.key)
        if not firsts:
            # The least memory that there can be, so that it is known what is short.
            rows = one_by_one(layout.stage_ranks, self._case.microbatches)
            for cuts, regions in self._list_cuts(layout, few=True):
                self.keep(self._case.timed(LIST, layout, cuts, rows, regions))
        self._firsts += firsts[:FINALISTS]

    def improve_lists(self) -> None:
        """Better orders and cuts, in turn, for the best that are there; unequal ranks change places too."""
        starts = sorted(
            (*self._firsts, *(trial for trial in self.best.values() if trial.fits and trial.trains)),
            key=lambda trial: trial.key,
        )
        starts = list(
            {(trial.layout, trial.cuts, trial.regions): trial for trial in reversed(starts)}.values()
        )
        starts.sort(key=lambda trial: trial.key)
        chosen = _varied(starts, 2 * FINALISTS)
        # A short look at many, then a long one at the few that are best.
        budget = self._budget.share(0.4)
        looked_at = []
        for index, trial in enumerate(chosen):
            looked_at.append(self._ordered(trial, budget.share(1 / (len(chosen) - index))))
            self.keep(looked_at[-1])
        looked_at.sort(key=lambda trial: trial.key)
        finalists = looked_at[: FINALISTS - 1]
        for index, trial in enumerate(finalists):
            refined = self._refined(trial, self._budget.share(1 / (len(finalists) - index)))
            self.keep(self._case.relaxed(refined))

    def _refined(self, trial: Trial, budget: Budget) -> Trial:
        """Cuts for the order, ranks for the cuts, an order for both, for as long as that helps."""
        while budget.passes > 0:
            before = trial
            trial = self._moved(trial, budget.share(0.3))
            trial = self._swapped(trial, budget.share(0.2))
            trial = self._rearranged(trial, budget.share(0.4))
            trial = self._ordered(trial, budget.share(0.4))
            if trial.end_s >= before.end_s * (1 - _SAME):
                break
        return trial

    def _ordered(self, trial: Trial, budget: Budget) -> Trial:
        """The best order for the trial's cuts."""
        problem = self._case.problem(trial.layout, trial.cuts, trial.regions)
        order = best_order(problem, budget, [trial.rows])
        if order is None:
            return trial
        result = self._case.timed(LIST, trial.layout, trial.cuts, order.rows, trial.regions)
        return min(replace(trial, name=LIST), result, key=lambda one: one.key)

    def _moved(self, trial: Trial, budget: Budget) -> Trial:
        """The same order with borders moved for as long as that helps."""
        problem = self._choices.problem(True, (1,) * (len(trial.cuts) - 1), every_place=True)
        size = sum(map(len, trial.rows)) + 40 * len(trial.cuts)
        improved = True
        while improved:
            improved = False
            for cuts in cut_moves(problem, trial.cuts):
                if not budget.take(size):
                    return trial
                better = self._case.better(trial, cuts)
                if better is not None:
                    trial, improved = better, True
                    break
        return trial

    def _swapped(self, trial: Trial, budget: Budget) -> Trial:
        """Unequal ranks in each other's place, with cuts and an order for that."""
        for layout in swapped(trial.layout, self._case.cluster):
            for cuts, regions in self._list_cuts(layout, few=True):
                if not budget.take(10 * sum(map(len, trial.rows))):
                    return trial
                order = first_order(self._case.problem(layout, cuts, regions))
                if order is not None:
                    result = self._case.timed(LIST, layout, cuts, order.rows, regions)
                    trial = min(trial, result, key=lambda one: one.key)
        return trial

    def _rearranged(self, trial: Trial, budget: Budget) -> Trial:
        """Stages on other ranks, put together or divided, as long as that helps a quick order of them."""
        if len(trial.rows) == 1 or any(trial.regions):
            return trial
        random, problem = Random(0), self._choices.problem(True, (1,) * (len(trial.cuts) - 1))
        order = first_order(self._case.problem(trial.layout, trial.cuts))
        current = trial
        if order is not None:
            current = self._case.timed(LIST, trial.layout, trial.cuts, order.rows)
        improved = True
        while improved:
            improved = False
            moves = list(rearranged(current.layout, current.cuts, problem))
            random.shuffle(moves)
            for layout, cuts in moves:
                if not budget.take(10 * sum(map(len, trial.rows))):
                    break
                order = first_order(self._case.problem(layout, cuts))
                if order is None or order.end_s >= current.end_s * (1 - _SAME):
                    continue
                result = self._case.timed(LIST, layout, cuts, order.rows)
                if result.end_s < current.end_s * (1 - _SAME):  # sums after the step count too
                    current, improved = result, True
                    break
        better = self._ordered(current, budget)
        return min(trial, better, key=lambda one: one.key)

    def _schedule(self, kind: ScheduleKind, layout: Layout) -> tuple[Schedule, Rows] | None:
        """A named schedule and its rows on the layout's ranks; None where it can't serve the numbers."""
        key = (kind.name, layout.own)
        if key not in self._named:
            try:
                schedule = kind(len(layout.own), self._case.microbatches, len(layout.ranks))
            except ScheduleError as error:
                self.refused[kind.name] = str(error)
                self._named[key] = None
                return None
            self._named[key] = (schedule, rows_of(schedule))
        named = self._named[key]
        return None if named is None else (named[0], _placed(named[1], layout))

    def _for_costs(self, kind: ScheduleKind, layout: Layout) -> Iterator[Trial]:
        """The kind's schedules for the times and the memory of stages, on the cuts that promise most."""
        case = self._case
        if layout.stage_ranks != layout.own:
            return
        is_large = 3 * len(layout.own) * case.microbatches > _LARGE
        chosen = list(islice(self._list_cuts(layout, few=True), 1 if is_large else 3))
        if not is_large:
            chosen.append(self._cuts_by_name(kind, layout))
        for cuts, regions in dict.fromkeys(chosen):
            stages = case.stages(layout, cuts, regions)
            try:
                schedule = kind(
                    len(stages), case.microbatches, placement=layout.own, costs=stages, cluster=case.cluster
                )
            except ScheduleError:
                continue  # too little memory for a microbatch: the other trials say by how much
            yield case.timed(kind.name, layout, cuts, rows_of(schedule), regions)

    def _cuts_by_name(self, kind: ScheduleKind, layout: Layout) -> tuple[Cuts, tuple[Regions, ...]]:
        """The cuts that suit the kind's schedule for equal costs, moved: those of `plan_stages`."""
        budget = moving_budget(len(layout.own), self._case.microbatches)
        by_name = Explorer(self._case, budget, trains=self._trains)
        by_name.try_named(replace(kind, for_costs=None), layout)
        by_name.move_named_cuts()
        best = by_name.ranked()[0]
        return best.cuts, best.regions

    def _list_cuts(self, layout: Layout, few: bool = False) -> Iterator[tuple[Cuts, tuple[Regions, ...]]]:
        stages = len(layout.own)
        nothing: tuple[Regions, ...] = ((),) * stages
        offered: set[tuple[Cuts, tuple[Regions, ...]]] = set()
        problem = self._choices.problem(True, (1,) * stages)
        for cuts in self._choices.general(layout):
            if (cuts, nothing) not in offered:
                offered.add((cuts, nothing))
                yield cuts, nothing
        if self._case.is_limited:
            ranks = self._case.cluster.ranks
            for most in dict.fromkeys((1, 2, max(ranks // 2, 1), ranks)):
                in_flight = [min(most, stages - stage) for stage in range(stages)]
                fitting = self._choices.in_memory(layout, in_flight)
                if fitting is not None and fitting[:2] not in offered:
                    offered.add(fitting[:2])
                    yield fitting[:2]
        if few:
            return
        for trial in self.ranked():
            if trial.layout == layout and (trial.cuts, trial.regions) not in offered:
                offered.add((trial.cuts, trial.regions))
                yield trial.cuts, trial.regions
        for cuts in all_cuts(problem, stages, _MOST_CUTS):
            if (cuts, nothing) not in offered and self._budget.take(3 * stages * self._case.microbatches):
                yield cuts, nothing


def moving_budget(stages: int, microbatches: int) -> Budget:
    """How many passes may be timed to move the borders of one schedule, when nothing else is tried."""
    return Budget(min(_MOST_MOVES * 3 * stages * microbatches, _MOST_PASSES_MOVED))


def _placed(rows: Rows, layout: Layout) -> Rows:
    placed: Rows = [[] for _ in rows]
    for place, rank in enumerate(layout.ranks):
        placed[rank] = rows[place]
    return placed


def _varied(trials: list[Trial], most: int) -> list[Trial]:
    """The best ones, no more than half of them on one layout."""
    counts: dict[Layout, int] = {}
    chosen: list[Trial] = []
    for trial in trials:
        if counts.get(trial.layout, 0) < max(most // 2, 1) and len(chosen) < most:
            counts[trial.layout] = counts.get(trial.layout, 0) + 1
            chosen.append(trial)
    return chosen
