"""A capture report as one HTML file that needs nothing else, in the manner of the run report."""

from __future__ import annotations

from partita.reporting.capture.capture_report import CaptureReport
from partita.reporting.capture.capture_tables import operator_list
from partita.reporting.drawing.pages import environment
from partita.reporting.drawing.units import format_count, format_seconds, format_share

__all__ = ["render_capture_html"]


def render_capture_html(report: CaptureReport) -> str:
    """Render the report as the text of one HTML file, to be written as UTF-8.

    The same report gives the same text. All that users wrote is escaped, and there are no scripts.
    """
    share = report.captured_nodes / report.nodes if report.nodes else 0.0
    return _ENVIRONMENT.get_template("capture.html.j2").render(report=report, share=share)


_ENVIRONMENT = environment(
    count=format_count, operators=operator_list, seconds=format_seconds, share=format_share
)
