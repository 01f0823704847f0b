"""A report as one HTML file that needs nothing else: styles and drawings are inside, scripts there are none.

What users wrote (titles, module names, environment) is escaped by the template; only the drawings that this
package made are inserted as markup, and they escape what they are given themselves. A content security
policy in the page forbids everything that could come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from partita.reporting.drawing.pages import environment
from partita.reporting.drawing.palette import KINDS, hexadecimal, kind_style
from partita.reporting.drawing.units import (
    format_bytes,
    format_count,
    format_loss,
    format_number,
    format_seconds,
    format_share,
)
from partita.reporting.replication.bucket_chart import bucket_chart
from partita.reporting.step.data import Figure, RunReport, StageRow, Timeline
from partita.reporting.step.differences import differences_text, signed_seconds, step_differences
from partita.reporting.step.gantt_chart import gantt_chart
from partita.reporting.step.loss_chart import difference_summary, loss_chart, thin_out

__all__ = ["figure_value", "render_html", "timeline_legend"]

_WIDE, _NARROW = 1040.0, 372.0  # natural widths of the two drawings of the losses; styles choose one
_MOST_MODULES = 8
_MOST_LOSSES = 200
_MOST_PARAMETERS = 6


def render_html(report: RunReport) -> str:
    """Render the report as the text of one HTML file, to be written as UTF-8.

    The same report gives the same text. Sections without data say so in a line; where there is a backward
    pass to show, they are left out.
    """
    timelines = (report.measured, report.simulated)
    differences = step_differences(*timelines)
    return _ENVIRONMENT.get_template("report.html.j2").render(
        report=report,
        figures=[(figure, figure_value(figure)) for figure in report.figures],
        stages=_stage_views(report.stages),
        totals=_totals(report.stages),
        most_modules=_MOST_MODULES,
        summary=difference_summary(report.losses),
        losses_wide=Markup(loss_chart(report.losses, report.validation, width=_WIDE)),
        losses_narrow=Markup(loss_chart(report.losses, report.validation, width=_NARROW, height=200)),
        loss_rows=thin_out(report.losses, _MOST_LOSSES),
        gantt=Markup(gantt_chart(timelines, width=_WIDE)),
        legend=timeline_legend(timelines),
        most_parameters=_MOST_PARAMETERS,
        differences=differences,
        differences_text="" if differences is None else differences_text(differences, *timelines),
        has_messages=any(span.kind == "comm" for timeline in timelines for span in timeline.spans),
        memory_note="; ".join(dict.fromkeys(row.note for row in report.memory if row.note)),
        most_memory=max((row.measured_bytes for row in report.memory), default=0.0),
        bucket_figure=Markup(bucket_chart(report.backward, width=_WIDE)) if report.backward else "",
    )


@dataclass(frozen=True, slots=True)
class _StageView:
    """A stage with what its bars need: shares of the whole, and lengths relative to the largest share."""

    row: StageRow
    time_share: float
    time_bar: float
    forward_part: float
    parameter_share: float
    parameter_bar: float


def _stage_views(rows: Sequence[StageRow]) -> list[_StageView]:
    times = [row.time_s for row in rows]
    counts = [row.parameters for row in rows]
    return [
        _StageView(
            row=row,
            time_share=_share(row.time_s, sum(times)),
            time_bar=_share(row.time_s, max(times)),
            forward_part=_share(row.forward_s, row.time_s),
            parameter_share=_share(row.parameters, sum(counts)),
            parameter_bar=_share(row.parameters, max(counts)),
        )
        for row in rows
    ]


def _totals(rows: Sequence[StageRow]) -> StageRow | None:
    """The sums below a plan of several stages, in a row of their own."""
    if len(rows) < 2:
        return None
    return StageRow(
        stage=0,
        rank=0,
        modules=(),
        parameters=sum(row.parameters for row in rows),
        parameter_bytes=sum(row.parameter_bytes for row in rows),
        forward_s=sum(row.forward_s for row in rows),
        backward_s=sum(row.backward_s for row in rows),
        send_bytes=sum(row.send_bytes for row in rows),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def figure_value(figure: Figure) -> str:
    """Return a key figure's value as text."""
    return figure.value if isinstance(figure.value, str) else format_number(figure.value)


def timeline_legend(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """Return name and colour of each kind that occurs: the known ones in their order, then the others."""
    kinds = {span.kind for timeline in timelines for span in timeline.spans} - {"idle"}
    ordered = [kind for kind in KINDS if kind in kinds] + sorted(kinds - set(KINDS))
    return [(style.name, hexadecimal(style.colour)) for style in map(kind_style, ordered)]


_ENVIRONMENT = environment(
    bytes=format_bytes,
    count=format_count,
    loss=format_loss,
    number=format_number,
    seconds=format_seconds,
    share=format_share,
    signed_seconds=signed_seconds,
    kind=lambda kind: kind_style(kind).name,
)
