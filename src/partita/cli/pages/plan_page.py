"""What ``partita plan`` tells of a plan: rows of candidates, the page, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partita.cli.options.plan_options import PlanOptions, Progress
from partita.cli.output.step_report import step_report
from partita.errors import PlanError
from partita.planning import Candidate, CostModel, Plan, Simulation, schedule_of, simulate
from partita.reporting import (
    CandidateRow,
    GainRow,
    PlanReport,
    cut_rows,
    planned_stage_rows,
    recomputed_words,
)

__all__ = ["Planned", "gains_of"]

_MOST_SIMULATED = 40


@dataclass(frozen=True)
class Planned:
    """A search's result, with the simulated step of the best.

    Attributes:
        title: of the model.
        request: what was asked for.
        candidates: the best first.
        simulation: of the first.
    """

    title: str
    request: PlanOptions
    candidates: tuple[Candidate, ...]
    simulation: Simulation

    @classmethod
    def of(cls, title: str, request: PlanOptions, candidates: Sequence[Candidate]) -> Planned:
        """Simulate the best of the candidates once more, for its timeline."""
        return cls(title, request, tuple(candidates), simulate_plan(candidates[0].plan))

    @property
    def plan(self) -> Plan:
        """The plan of the best candidate."""
        return self.candidates[0].plan

    @property
    def limits(self) -> tuple[int | None, ...]:
        """What each rank may hold."""
        return tuple(self.request.cluster.memory(rank) for rank in range(self.plan.ranks))

    def rows(self) -> tuple[CandidateRow, ...]:
        """A row a candidate; of many the best only."""
        return tuple(self._row(candidate) for candidate in self.candidates[:_MOST_SIMULATED])

    def _row(self, candidate: Candidate) -> CandidateRow:
        plan = candidate.plan
        limits = (self.request.cluster.memory(rank) for rank in range(plan.ranks))
        fits = all(
            limit is None or peak <= limit for peak, limit in zip(candidate.peak_bytes, limits, strict=True)
        )
        again = [words for index in range(len(plan.stages)) if (words := recomputed_words(plan, index))]
        return CandidateRow(
            plan.schedule,
            len(plan.stages),
            candidate.makespan_s,
            candidate.bubble,
            candidate.span_s,
            candidate.span_bubble,
            max(candidate.peak_bytes),
            fits,
            f"{len(again)} of {len(plan.stages)}" if again else "",
        )

    def report(self, gains: Sequence[GainRow], environment: Mapping[str, str]) -> PlanReport:
        """What the HTML page shows."""
        plan = self.plan
        page = step_report(
            self.simulation,
            self.rows(),
            title=f"{self.title} in {len(plan.stages)} stages",
            subtitle=f"partita plan: {plan.ranks} ranks, {plan.microbatches} microbatches, {plan.schedule}",
            limits=self.limits,
            environment=environment,
        )
        return replace(page, stages=planned_stage_rows(plan), cuts=cut_rows(plan), gains=tuple(gains))

    def as_dict(self) -> dict[str, Any]:
        """The plan and the candidates as plain values."""
        return {
            "plan": json.loads(self.plan.to_json()),
            "makespan_s": self.simulation.makespan_s,
            "bubble": self.simulation.bubble,
            "span_s": self.simulation.span_s,
            "span_bubble": self.simulation.span_bubble,
            "peak_bytes": self.simulation.peak_bytes,
            "candidates": [
                {
                    "schedule": row.name,
                    "stages": row.stages,
                    "makespan_s": row.makespan_s,
                    "bubble": row.bubble,
                    "span_bubble": row.span_bubble,
                    "peak_bytes": row.peak,
                    "fits": row.fits,
                    "recomputed": row.note,
                }
                for row in self.rows()
            ],
        }


def simulate_plan(plan: Plan) -> Simulation:
    """One step of a plan, in its own order."""
    return simulate(schedule_of(plan), plan)


def gains_of(request: PlanOptions, costs: CostModel, progress: Progress) -> tuple[GainRow, ...]:
    """Return what the best plan would be with one more rank, and with or without recomputation: the other way
    than ``request`` has it. Each takes one more search.
    """
    other = "without recomputation" if request.recompute else "with recomputation"
    changes = (
        ("one more rank", request.with_one_more_rank()),
        (other, replace(request, recompute=not request.recompute)),
    )
    rows = []
    for number, (what, changed) in enumerate(changes):
        progress(number / len(changes))
        rows.append(_gain(what, changed, costs))
    return tuple(rows)


def _gain(what: str, request: PlanOptions, costs: CostModel) -> GainRow:
    try:
        best = request.candidates(costs)[0]
    except PlanError as error:
        return GainRow(what, None, note=str(error).partition(". ")[0][:200])
    note = f"{best.plan.schedule}, {len(best.plan.stages)} stages on {best.plan.ranks} ranks"
    return GainRow(what, best.makespan_s, max(best.peak_bytes), note)
