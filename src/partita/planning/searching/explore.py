"""The search itself: named schedules and orders of its own, over layouts, cuts and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partita.planning.generators.registry import ScheduleKind
from partita.planning.searching.explorer import FINALISTS, Explorer
from partita.planning.searching.layouts import Layout, layouts
from partita.planning.searching.orders.improve import Budget
from partita.planning.searching.trial import Case

__all__ = ["explore"]

_LEAST_PASSES, _MOST_PASSES = 1_500_000, 2_500_000
_PASSES_FOR_EACH = 12_000
"""So often each pass of the step may be timed."""
_SMALL = 1_500
_MOST_TIMED = 60
"""So often at least, however large the step is."""


def explore(
    case: Case,
    kinds: Sequence[ScheduleKind],
    stages_per_rank: Sequence[int],
    *,
    with_lists: bool,
    progress: Callable[[str, float], None] | None = None,
    effort: float = 1.0,
) -> Explorer:
    """Try everything, and return the explorer with the best of each kind.

    Args:
        case: what is to be planned.
        kinds: the named schedules.
        stages_per_rank: as in `search`.
        with_lists: whether orders of its own are made.
        progress: as in `search`.
        effort: how much of the usual is tried; at 0.0 nothing is improved.
    """
    most_stages = len(case.costs.allowed_borders) + 1
    choices = list(layouts(case.cluster, stages_per_rank, most_stages))
    passes = 3 * max((len(layout.own) for layout in choices), default=1) * case.microbatches
    wanted = min(max(_PASSES_FOR_EACH * passes, _LEAST_PASSES), _MOST_PASSES)
    is_large = passes > _SMALL
    trains = any(kind.trains for kind in kinds) or with_lists
    budget = Budget(int(effort * max(wanted, _MOST_TIMED * passes)))
    explorer = Explorer(case, budget, trains=trains)
    steps = len(choices) * (len(kinds) + with_lists) + 2

    def tell(what: str, step: int) -> None:
        if progress is not None:
            progress(what, step / steps)

    step = 0
    for layout in choices:
        for kind in kinds:
            tell(f"{kind.name}, {len(layout.own)} stages", step)
            explorer.try_named(kind, layout)
            step += 1
        if with_lists:
            tell(f"list schedules, {len(layout.own)} stages", step)
            explorer.try_list(layout)
            step += 1
    tell("moving cuts", steps - 2)
    # Small steps are quick: more of their schedules get better cuts.
    finalists = FINALISTS if is_large else 3 * FINALISTS
    if case.is_limited and case.recompute:
        own_budget = Budget(int(effort * (wanted // 4 if is_large else wanted)))
        _keep_without_recomputation(explorer, case, kinds, choices, own_budget, finalists)
    explorer.move_named_cuts(0.25 if with_lists else 1.0, finalists)
    if with_lists:
        tell("improving orders", steps - 1)
        explorer.improve_lists()
    tell("done", steps)
    return explorer


def _keep_without_recomputation(
    explorer: Explorer,
    case: Case,
    kinds: Sequence[ScheduleKind],
    choices: Sequence[Layout],
    budget: Budget,
    finalists: int,
) -> None:
    """Named schedules on cuts that are moved until they fit, in place of recomputing to make them fit."""
    other = explorer.for_case(case.changed(recompute=False), budget)
    for layout in choices:
        for kind in kinds:
            if kind.for_costs is None and kind.trains:
                other.try_named(kind, layout)
    other.move_named_cuts(finalists=finalists)
    for trial in other.ranked():
        if trial.fits:
            explorer.keep(trial)
