"""Reports of a run as text, tables, one HTML file or a Chrome trace, from frozen data alone.

The data are numbers and names (`RunReport` and its parts); nothing here knows torch or a process.
"""

from __future__ import annotations

from partita.reporting.backward_pass import BackwardPass, ReducedBucket
from partita.reporting.bucket_table import bucket_table
from partita.reporting.capture_html import render_capture_html
from partita.reporting.capture_report import BreakRow, CaptureReport, GraphRow, LeftOutRow, RegionRow
from partita.reporting.capture_tables import capture_tables
from partita.reporting.chrome import chrome_trace
from partita.reporting.codec import report_from_json, report_to_json
from partita.reporting.data import Figure, LossPoint, RunReport, StageRow, Timeline, TimelineSpan
from partita.reporting.figures import key_figures
from partita.reporting.html import render_html
from partita.reporting.modules import outermost_modules, summarise_modules
from partita.reporting.replication_report import backward_pass, replication_report
from partita.reporting.tables import loss_table, plan_table
from partita.reporting.text import timeline_text
from partita.reporting.units import (
    format_bytes,
    format_count,
    format_loss,
    format_number,
    format_seconds,
    format_share,
)

__all__ = [
    "BackwardPass",
    "BreakRow",
    "CaptureReport",
    "Figure",
    "GraphRow",
    "LeftOutRow",
    "LossPoint",
    "ReducedBucket",
    "RegionRow",
    "RunReport",
    "StageRow",
    "Timeline",
    "TimelineSpan",
    "backward_pass",
    "bucket_table",
    "capture_tables",
    "chrome_trace",
    "format_bytes",
    "format_count",
    "format_loss",
    "format_number",
    "format_seconds",
    "format_share",
    "key_figures",
    "loss_table",
    "outermost_modules",
    "plan_table",
    "render_capture_html",
    "render_html",
    "replication_report",
    "report_from_json",
    "report_to_json",
    "summarise_modules",
    "timeline_text",
]
