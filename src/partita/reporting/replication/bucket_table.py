"""The buckets of a backward pass as a table for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from partita.reporting.drawing.units import format_bytes, format_seconds
from partita.reporting.replication.backward_pass import BackwardPass

__all__ = ["bucket_table"]


def bucket_table(backward: BackwardPass) -> Table:
    """Make a table with one row a bucket, and a row of totals.

    ``exposed`` is a duration; all other times are seconds since the start of the pass.
    """
    table = Table(title="Buckets", title_justify="left", show_footer=len(backward.buckets) > 1)
    table.add_column("bucket", justify="right", footer="all", no_wrap=True)
    table.add_column("parameters", overflow="fold", ratio=1)
    table.add_column("size", justify="right", footer=format_bytes(backward.size_bytes), no_wrap=True)
    table.add_column("ready", justify="right", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("mean known", justify="right", footer=format_seconds(backward.end_s), no_wrap=True)
    table.add_column("exposed", justify="right", footer=format_seconds(backward.exposed_s), no_wrap=True)
    for bucket in backward.buckets:
        table.add_row(
            str(bucket.bucket),
            Text(f"{', '.join(bucket.parameters)} ({bucket.dtype})"),
            format_bytes(bucket.size_bytes),
            "no gradient" if bucket.ready_s is None else format_seconds(bucket.ready_s),
            format_seconds(bucket.sent_s),
            format_seconds(bucket.finished_s),
            format_seconds(bucket.exposed_s),
        )
    return table
