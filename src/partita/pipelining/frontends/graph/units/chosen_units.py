"""Which units a model is planned with: whole blocks, or smaller ones where many stages are wanted."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from partita.capture import Captured
from partita.pipelining.frontends.cuts.plans import planned_units
from partita.pipelining.frontends.graph.other_mode import ends_in_both_modes
from partita.pipelining.frontends.graph.units.costs import unit_ends, unit_names
from partita.planning import Plan

__all__ = ["units_to_plan"]

_UNITS_A_STAGE = 4
"""So many units a stage are wanted at least: from a few large ones no equal stages can be made."""


def units_to_plan(
    whole: GraphModule, evaluation: Captured | None, stages: int | None, plan: Plan | None
) -> tuple[list[int], list[str]]:
    """Where the units to plan with end, and their names: as large as leaves every stage several, so that
    stages can be as long as each other; for a plan, those that it was made of.

    Args:
        evaluation: of the other mode, whose graph is cut alike; None where ``whole`` serves both.
    """
    tried = []
    for ends in _ends(whole, evaluation, plan):
        names = unit_names(whole, ends)
        tried.append((ends, names))
        several = stages is not None and len(names) >= _UNITS_A_STAGE * stages
        if several or (plan is not None and planned_units(plan) == names):
            return ends, names
        if stages is None and plan is None:
            break
    if stages is None:
        return tried[0]
    # The smallest units are single operations, and many values cross between them.
    *blocks, operations = tried
    enough = [one for one in blocks if len(one[1]) >= stages]
    return enough[-1] if enough else operations  # planning refuses too few, and says how many there are


def _ends(whole: GraphModule, evaluation: Captured | None, plan: Plan | None) -> Iterator[list[int]]:
    for ends in unit_ends(whole):
        if evaluation is not None:
            yield ends_in_both_modes(whole, ends, evaluation.module)
        if evaluation is None or plan is not None:  # a plan may have been made for one mode
            yield ends
