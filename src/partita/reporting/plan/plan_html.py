"""A plan, or a comparison of schedules, as one HTML file that needs nothing else, in the manner of the run
report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from partita.reporting.drawing.pages import environment
from partita.reporting.drawing.units import format_bytes, format_count, format_seconds, format_share
from partita.reporting.plan.candidates import CandidateRow, format_memory
from partita.reporting.plan.memory_chart import memory_chart
from partita.reporting.plan.plan_report import GainRow, PlannedStageRow, PlanReport
from partita.reporting.step.gantt_chart import gantt_chart
from partita.reporting.step.html import figure_value, timeline_legend

__all__ = ["render_plan_html"]

_WIDTH = 1040.0
_MOST_MODULES = 2
_MOST_CANDIDATES = 200


def render_plan_html(report: PlanReport) -> str:
    """Render the report as the text of one HTML file, to be written as UTF-8.

    The same report gives the same text. All that users wrote is escaped, and there are no scripts.
    """
    return _ENVIRONMENT.get_template("plan.html.j2").render(
        report=report,
        figures=[(figure, figure_value(figure)) for figure in report.figures],
        stages=_stage_views(report.stages),
        most_modules=_MOST_MODULES,
        cuts_have_reasons=any(cut.reason or cut.other for cut in report.cuts),
        candidates=_candidate_views(report.candidates[:_MOST_CANDIDATES]),
        candidates_have_notes=any(row.note for row in report.candidates),
        gains=[(gain, _gained(gain, report)) for gain in report.gains],
        critical=[
            (what, seconds, _share(seconds, report.timeline.makespan_s)) for what, seconds in report.critical
        ],
        gantt=Markup(gantt_chart([report.timeline], width=_WIDTH)),
        memory_figure=Markup(
            memory_chart(report.memory, report.timeline.end_s, report.unit, width=_WIDTH)
            if report.memory
            else ""
        ),
        has_limit=any(lane.limit is not None for lane in report.memory),
        legend=timeline_legend([report.timeline]),
        unit=report.unit,
    )


@dataclass(frozen=True, slots=True)
class _StageView:
    """A stage with what its bars need: its share of the time, and lengths relative to the slowest stage."""

    row: PlannedStageRow
    time_share: float
    time_bar: float
    forward_part: float


def _stage_views(rows: Sequence[PlannedStageRow]) -> list[_StageView]:
    times = [row.time_s for row in rows]
    return [
        _StageView(
            row,
            _share(row.time_s, sum(times)),
            _share(row.time_s, max(times)),
            _share(row.forward_s, row.time_s),
        )
        for row in rows
    ]


def _candidate_views(rows: Sequence[CandidateRow]) -> list[tuple[CandidateRow, float]]:
    """Each candidate with the length of its bar, relative to the slowest."""
    slowest = max((row.makespan_s for row in rows), default=0.0)
    return [(row, _share(row.makespan_s, slowest)) for row in rows]


def _gained(gain: GainRow, report: PlanReport) -> str:
    """How much shorter a step becomes."""
    now = report.timeline.makespan_s
    if gain.makespan_s is None or not now:
        return ""
    share = 1.0 - gain.makespan_s / now
    if abs(share) < 5e-4:
        return "as long"
    return f"{format_share(share)} shorter" if share > 0 else f"{format_share(-share)} longer"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_ENVIRONMENT = environment(
    bytes=format_bytes, count=format_count, memory=format_memory, seconds=format_seconds, share=format_share
)
