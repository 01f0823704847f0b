"""The page of a simulated step."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace

from partita._version import __version__
from partita.planning import Simulation
from partita.reporting import (
    CandidateRow,
    Figure,
    MemoryUnit,
    PlanReport,
    critical_shares,
    format_memory,
    format_seconds,
    format_share,
    limit_words,
    memory_lanes,
    simulation_timeline,
)

__all__ = ["step_report"]


def step_report(
    simulation: Simulation,
    candidates: Sequence[CandidateRow],
    *,
    title: str,
    subtitle: str,
    unit: MemoryUnit = "bytes",
    limits: Sequence[float | None],
    divided_by: float = 1.0,
    left_out: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> PlanReport:
    """Put together what the page shows of any step; a plan adds its own parts.

    Args:
        simulation: of the first candidate.
        candidates: all, best first.
        title: the heading.
        subtitle: the line below.
        unit: of memory.
        limits: for each rank, what it may hold in that unit.
        divided_by: how many bytes of the simulation are one of the unit.
        left_out: what can't be done, with the reason of each.
        environment: what else describes it.
    """
    best = candidates[0]
    amount, _, of = format_memory(best.peak, unit).partition(" ")
    figures = (
        Figure("Step", format_seconds(simulation.makespan_s), note=f"{best.name}, {best.stages} stages"),
        Figure("Bubble", format_share(simulation.bubble), note="of all ranks' time in the step"),
        Figure("Bubble by span", format_share(simulation.span_bubble), note="of the longest span of a rank"),
        Figure(
            "Peak memory",
            amount,
            of,
            note=limit_words(limits, unit) or "of the fullest rank",
            tone="plain" if best.fits else "bad",
        ),
    )
    has_time = simulation.makespan_s > 0
    return PlanReport(
        title=title,
        subtitle=subtitle,
        figures=figures,
        timeline=replace(simulation_timeline(simulation, transfers=True), title=best.name),
        memory=memory_lanes(simulation, limits, divided_by=divided_by),
        unit=unit,
        candidates=tuple(candidates),
        left_out=tuple((left_out or {}).items()),
        critical=critical_shares(simulation) if has_time else (),
        environment={**(environment or {}), "partita": __version__, "Python": platform.python_version()},
    )
