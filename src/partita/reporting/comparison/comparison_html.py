"""A comparison as one HTML file that needs nothing else, in the manner of the run report."""

from __future__ import annotations

from dataclasses import replace

from markupsafe import Markup

from partita.reporting.comparison.compared import RunComparison
from partita.reporting.comparison.comparison_table import quantity_text
from partita.reporting.drawing.pages import environment
from partita.reporting.step.gantt_chart import gantt_chart
from partita.reporting.step.html import timeline_legend

__all__ = ["render_comparison_html"]

_WIDE = 1040.0


def render_comparison_html(comparison: RunComparison) -> str:
    """Render a comparison as the text of one HTML file, to be written as UTF-8.

    The same comparison gives the same text. All that users wrote is escaped, and there are no scripts.
    """
    timelines = [replace(run.timeline, title=run.name) for run in comparison.runs]
    return _ENVIRONMENT.get_template("comparison.html.j2").render(
        comparison=comparison,
        gantt=Markup(gantt_chart(timelines, width=_WIDE)),
        legend=timeline_legend(timelines),
        losses_compared=sum(bool(run.losses) for run in comparison.runs) > 1,
    )


_ENVIRONMENT = environment(quantity=quantity_text)
