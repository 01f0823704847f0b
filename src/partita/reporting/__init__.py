"""Reports of a run as text, tables, one HTML file or a Chrome trace, from frozen data alone.

The data are numbers and names (`RunReport` and its parts); nothing here knows torch or a process.
"""

from __future__ import annotations

from partita.reporting.capture.capture_html import render_capture_html
from partita.reporting.capture.capture_report import BreakRow, CaptureReport, GraphRow, LeftOutRow, RegionRow
from partita.reporting.capture.capture_tables import capture_tables
from partita.reporting.comparison.compared import (
    ComparedRun,
    Quantity,
    RunComparison,
    compared_plan,
    compared_report,
)
from partita.reporting.comparison.comparison_html import render_comparison_html
from partita.reporting.comparison.comparison_table import comparison_table
from partita.reporting.drawing.units import (
    format_bytes,
    format_count,
    format_loss,
    format_number,
    format_seconds,
    format_share,
)
from partita.reporting.plan.candidates import (
    CandidateRow,
    MemoryUnit,
    candidate_table,
    format_memory,
    limit_words,
)
from partita.reporting.plan.modules import outermost_modules, summarise_modules
from partita.reporting.plan.plan_html import render_plan_html
from partita.reporting.plan.plan_report import CutRow, GainRow, MemoryLane, PlannedStageRow, PlanReport
from partita.reporting.plan.planned import (
    critical_shares,
    cut_rows,
    memory_lanes,
    planned_stage_rows,
    recomputed_words,
    stage_rows,
)
from partita.reporting.plan.run_text import report_text
from partita.reporting.plan.tables import loss_table, plan_table, planned_table
from partita.reporting.replication.backward_pass import BackwardPass, ReducedBucket
from partita.reporting.replication.bucket_table import bucket_table
from partita.reporting.split.split_chart import split_chart
from partita.reporting.split.split_html import render_split_html
from partita.reporting.split.split_report import CrossingRow, PieceRow, StagesReport, TiedRow
from partita.reporting.split.split_text import split_drawing, split_table
from partita.reporting.step.chrome import chrome_trace
from partita.reporting.step.codec import report_from_json, report_to_json
from partita.reporting.step.data import (
    Figure,
    LossPoint,
    RankMemory,
    RunReport,
    StageRow,
    Timeline,
    TimelineSpan,
)
from partita.reporting.step.differences import ActionRow, StepDifferences, TimeUse, step_differences
from partita.reporting.step.figures import key_figures
from partita.reporting.step.gantt_chart import timeline_svg
from partita.reporting.step.html import render_html
from partita.reporting.step.measured import measured_timeline
from partita.reporting.step.replication_report import backward_pass, replication_report
from partita.reporting.step.simulated import action_span, simulation_timeline
from partita.reporting.step.text import timeline_drawing, timeline_text

__all__ = [
    "ActionRow",
    "BackwardPass",
    "BreakRow",
    "CandidateRow",
    "CaptureReport",
    "ComparedRun",
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
    "Quantity",
    "RankMemory",
    "ReducedBucket",
    "RegionRow",
    "RunComparison",
    "RunReport",
    "StageRow",
    "StagesReport",
    "StepDifferences",
    "TiedRow",
    "TimeUse",
    "Timeline",
    "TimelineSpan",
    "action_span",
    "backward_pass",
    "bucket_table",
    "candidate_table",
    "capture_tables",
    "chrome_trace",
    "compared_plan",
    "compared_report",
    "comparison_table",
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
    "limit_words",
    "loss_table",
    "measured_timeline",
    "memory_lanes",
    "outermost_modules",
    "plan_table",
    "planned_stage_rows",
    "planned_table",
    "recomputed_words",
    "render_capture_html",
    "render_comparison_html",
    "render_html",
    "render_plan_html",
    "render_split_html",
    "replication_report",
    "report_from_json",
    "report_text",
    "report_to_json",
    "simulation_timeline",
    "split_chart",
    "split_drawing",
    "split_table",
    "stage_rows",
    "step_differences",
    "summarise_modules",
    "timeline_drawing",
    "timeline_svg",
    "timeline_text",
]
