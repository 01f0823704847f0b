"""The pieces of a model as one HTML file."""

from __future__ import annotations

from markupsafe import Markup

from partita.reporting.drawing.pages import environment
from partita.reporting.drawing.units import format_bytes, format_count
from partita.reporting.split.split_chart import split_chart
from partita.reporting.split.split_report import StagesReport

__all__ = ["render_split_html"]


def render_split_html(report: StagesReport) -> str:
    """Render the report as the text of one HTML file, to be written as UTF-8.

    The same report gives the same text. All that users wrote is escaped, and there are no scripts.
    """
    return _ENVIRONMENT.get_template("split.html.j2").render(report=report, chart=Markup(split_chart(report)))


_ENVIRONMENT = environment(bytes=format_bytes, count=format_count)
