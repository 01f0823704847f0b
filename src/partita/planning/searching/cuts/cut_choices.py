"""Which cuts suit a layout, before an order is known for them or borders are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from partita.planning.cutting._cuts import CutProblem, Cuts, find_cuts
from partita.planning.cutting._rank_memory import find_cuts_within
from partita.planning.cutting.cut_problem import make_cut_problem
from partita.planning.generators.registry import ScheduleKind
from partita.planning.schedules.schedule import Schedule
from partita.planning.searching.cuts.balance import RULES, balanced_cuts, fewer_places, weighed
from partita.planning.searching.cuts.memory_cuts import FittingCuts, cuts_in_memory
from partita.planning.searching.layouts import Layout
from partita.planning.searching.trial import Case

__all__ = ["CutChoices"]

_PLACES_A_STAGE, _LEAST_PLACES = 12, 128


class CutChoices:
    """Looks for each kind of cuts once."""

    def __init__(self, case: Case, *, trains: bool) -> None:
        self._case = case
        self._trains = trains
        self._problems: dict[tuple[object, ...], CutProblem] = {}
        self._cuts: dict[tuple[object, ...], Cuts | None] = {}
        self._fitting: dict[tuple[Layout, tuple[int, ...]], FittingCuts | None] = {}

    def problem(self, hidden: bool, in_flight: Sequence[int], *, every_place: bool = False) -> CutProblem:
        """The problem of cutting, at a few good places for each stage where there are very many.

        Args:
            hidden: whether messages travel beside the passes.
            in_flight: how many microbatches each stage keeps.
            every_place: at all places, however many.
        """
        key = (hidden, tuple(in_flight), every_place)
        if key not in self._problems:
            problem = make_cut_problem(
                self._case.costs,
                self._case.cluster,
                in_flight,
                self._case.parameter_copies,
                hides_transfers=hidden,
                trains=self._trains,
            )
            fewer = fewer_places(problem, max(_PLACES_A_STAGE * len(in_flight), _LEAST_PLACES))
            # Fine units may lie so unevenly that few places are left: then all of them are taken.
            enough = len(fewer.places) >= 2 * len(in_flight)
            self._problems[key] = fewer if enough and not every_place else problem
        return self._problems[key]

    def for_schedule(self, kind: ScheduleKind, layout: Layout, schedule: Schedule) -> Iterator[Cuts]:
        """Cuts for a schedule that is known: those that suit any, and those that fit into memory with it."""
        yield from self.general(layout)
        yield from self._by_rule(len(layout.own))
        if not self._case.is_limited:
            return
        limits = [size for rank in layout.ranks if (size := self._case.cluster.memory(rank)) is not None]
        if not limits:
            return
        limit = min(limits)

        def within() -> Cuts | None:
            problem = self.problem(kind.hides_transfers, schedule.in_flight())
            return find_cuts_within(problem, schedule, limit)

        yield from self._once((kind.name, layout.own, limit), within)
        fitting = self.in_memory(layout, schedule.in_flight())
        if fitting is not None:
            yield fitting.cuts

    def general(self, layout: Layout) -> Iterator[Cuts]:
        """Cuts for balanced ranks, and for the fastest slowest stage with messages hidden and not."""
        even = (1,) * len(layout.own)
        speeds = [self._case.cluster.speed(rank) for rank in range(len(layout.ranks))]
        problem = self.problem(True, even)
        yield from self._once(
            ("balanced", layout), partial(balanced_cuts, problem, layout.stage_ranks, speeds)
        )
        for hidden in (False, True):
            problem = self.problem(hidden, even)
            yield from self._once(("bottleneck", len(even), hidden), partial(find_cuts, problem))

    def in_memory(self, layout: Layout, in_flight: Sequence[int]) -> FittingCuts | None:
        """Cuts with which each rank's memory suffices for so many microbatches; units may be recomputed."""
        key = (layout, tuple(in_flight))
        if key not in self._fitting:
            problem = self.problem(True, (1,) * len(layout.own))
            self._fitting[key] = cuts_in_memory(self._case, problem, layout, in_flight)
        return self._fitting[key]

    def _by_rule(self, stages: int) -> Iterator[Cuts]:
        """The cuts of the usual rules, which moving borders from other cuts may not come to."""
        problem, units = self.problem(True, (1,) * stages), self._case.costs.units

        def by(rule: str) -> Cuts | None:
            return find_cuts(weighed(problem, rule, units))

        for rule in RULES:
            yield from self._once((rule, stages), partial(by, rule))

    def _once(self, key: tuple[object, ...], find: Callable[[], Cuts | None]) -> Iterator[Cuts]:
        """The cuts that `find` gives, if any; it is called once for each key."""
        if key not in self._cuts:
            self._cuts[key] = find()
        cuts = self._cuts[key]
        if cuts is not None:
            yield cuts
