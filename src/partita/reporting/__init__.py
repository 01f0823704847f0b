"""Reports of a run as text, tables, one HTML file or a Chrome trace, from frozen data alone.

The data are numbers and names (`RunReport` and its parts); nothing here knows torch or a process.
"""

from __future__ import annotations

from partita.reporting.backward_pass import BackwardPass, ReducedBucket
from partita.reporting.bucket_table import bucket_table
from partita.reporting.candidates import CandidateRow, MemoryUnit, candidate_table, format_memory
from partita.reporting.capture_html import render_capture_html
from partita.reporting.capture_report import BreakRow, CaptureReport, GraphRow, LeftOutRow, RegionRow
from partita.reporting.capture_tables import capture_tables
from partita.reporting.chrome import chrome_trace
from partita.reporting.codec import report_from_json, report_to_json
from partita.reporting.data import Figure, LossPoint, RunReport, StageRow, Timeline, TimelineSpan
from partita.reporting.figures import key_figures
from partita.reporting.html import render_html
from partita.reporting.modules import outermost_modules, summarise_modules
from partita.reporting.plan_html import render_plan_html
from partita.reporting.plan_report import CutRow, GainRow, MemoryLane, PlannedStageRow, PlanReport
from partita.reporting.planned import (
    critical_shares,
    cut_rows,
    memory_lanes,
    planned_stage_rows,
    recomputed_words,
    stage_rows,
)
from partita.reporting.replication_report import backward_pass, replication_report
from partita.reporting.simulated import action_span, simulation_timeline
from partita.reporting.split_chart import split_chart
from partita.reporting.split_html import render_split_html
from partita.reporting.split_report import CrossingRow, PieceRow, StagesReport, TiedRow
from partita.reporting.split_text import split_drawing, split_table
from partita.reporting.tables import loss_table, plan_table, planned_table
from partita.reporting.text import timeline_drawing, timeline_text
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
    "CandidateRow",
    "CaptureReport",
    "CrossingRow",
    "CutRow",
    "Figure",
    "GainRow",
    "GraphRow",
    "LeftOutRow",
    "LossPoint",
    "MemoryLane",
    "MemoryUnit",
    "PieceRow",
    "PlanReport",
    "PlannedStageRow",
    "ReducedBucket",
    "RegionRow",
    "RunReport",
    "StageRow",
    "StagesReport",
    "TiedRow",
    "Timeline",
    "TimelineSpan",
    "action_span",
    "backward_pass",
    "bucket_table",
    "candidate_table",
    "capture_tables",
    "chrome_trace",
    "critical_shares",
    "cut_rows",
    "format_bytes",
    "format_count",
    "format_loss",
    "format_memory",
    "format_number",
    "format_seconds",
    "format_share",
    "key_figures",
    "loss_table",
    "memory_lanes",
    "outermost_modules",
    "plan_table",
    "planned_stage_rows",
    "planned_table",
    "recomputed_words",
    "render_capture_html",
    "render_html",
    "render_plan_html",
    "render_split_html",
    "replication_report",
    "report_from_json",
    "report_to_json",
    "simulation_timeline",
    "split_chart",
    "split_drawing",
    "split_table",
    "stage_rows",
    "summarise_modules",
    "timeline_drawing",
    "timeline_text",
]
