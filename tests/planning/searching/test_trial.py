from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.profiles import random_profile

from partita.planning import TiedUnits, get_schedule
from partita.planning.cutting._cuts import Cuts
from partita.planning.searching.layouts import Layout, layouts
from partita.planning.searching.orders.clock import rows_of
from partita.planning.searching.trial import Case


def _cuts(layout: Layout, units: int) -> list[Cuts]:
    """Equal stages, and those with one border moved."""
    stages = len(layout.own)
    equal = [units * stage // stages for stage in range(stages + 1)]
    moved = [
        [*equal[:border], place, *equal[border + 1 :]]
        for border in range(1, stages)
        for place in range(equal[border - 1] + 1, equal[border + 1])
    ]
    return [tuple(equal), *map(tuple, moved)]


@pytest.mark.parametrize("name", ["ForwardOnly", "1F1B", "ZBH1"])
@pytest.mark.parametrize("seed", [1, 2, 6, 18, 19])
@pytest.mark.parametrize("tied", [False, True])
def test_only_cuts_that_are_no_better_are_left_out(name: str, seed: int, tied: bool) -> None:
    """In steps without backward passes all were: what they would have taken counted."""
    profile = random_profile(seed, most_ranks=4)
    costs = profile.costs
    if tied:
        last = len(costs.units) - 1
        units = tuple(replace(unit, parameter_bytes=unit.parameter_bytes + 3) for unit in costs.units)
        costs = replace(costs, units=units, tied=(TiedUnits((0, last), 3, gradient_bytes=3),))
    case = Case(costs, profile.cluster, profile.microbatches, 2.0, recompute=True)
    layout = next(iter(layouts(profile.cluster, (1,), len(costs.units))))
    rows = rows_of(get_schedule(name)(len(layout.own), profile.microbatches))
    trials = [case.timed(name, layout, cuts, rows) for cuts in _cuts(layout, len(costs.units))]
    for trial in trials:
        for other in trials:
            assert case.better(trial, other.cuts) == (other if other.key < trial.key else None)


@pytest.mark.parametrize("seed", [2, 6, 19])
def test_what_is_remembered_of_other_cuts_changes_nothing(seed: int) -> None:
    """Ends by rows, peaks by rows and rank: also where only what comes from another rank has changed."""
    profile = random_profile(seed, most_ranks=4)
    count = len(profile.costs.units) - 1
    sizes = {"entry_bytes": tuple(range(count)), "exit_bytes": (1,) * count}
    costs = replace(profile.costs, **sizes)
    arguments = costs, profile.cluster, profile.microbatches, 2.0
    case = Case(*arguments, recompute=True)
    layout = next(iter(layouts(profile.cluster, (1,), len(costs.units))))
    rows = rows_of(get_schedule("1F1B")(len(layout.own), profile.microbatches))
    for cuts in _cuts(layout, len(costs.units)):
        trial = case.timed("1F1B", layout, cuts, rows)
        assert trial == Case(*arguments, recompute=True).timed("1F1B", layout, cuts, rows)
        without = case.changed(recompute=False).timed("1F1B", layout, cuts, rows)
        assert without == Case(*arguments, recompute=False).timed("1F1B", layout, cuts, rows)


@pytest.mark.parametrize("seed", [2, 6, 18, 19])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_does_not_fit_is_not_timed(seed: int, recompute: bool) -> None:
    profile = random_profile(seed, most_ranks=4)
    case = Case(profile.costs, profile.cluster, profile.microbatches, 2.0, recompute)
    layout = next(iter(layouts(profile.cluster, (1,), len(profile.costs.units))))
    rows = rows_of(get_schedule("1F1B")(len(layout.own), profile.microbatches))
    for cuts in _cuts(layout, len(profile.costs.units)):
        trial = case.timed("1F1B", layout, cuts, rows)
        fitting = case.timed_if_it_fits("1F1B", layout, cuts, rows)
        assert fitting == (trial if trial.fits else None)
