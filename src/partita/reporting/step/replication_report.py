"""The report of a replicated module's last backward pass: what there is to show without any pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from partita.errors import ReportError
from partita.reporting.drawing.units import format_bytes, format_seconds, format_share
from partita.reporting.replication.backward_pass import BackwardPass, ReducedBucket
from partita.reporting.step.data import Figure, RunReport, Timeline

if TYPE_CHECKING:
    from partita.ddp import Replication

__all__ = ["backward_pass", "replication_report"]


def replication_report(
    replication: Replication,
    *,
    title: str,
    subtitle: str = "",
    environment: Mapping[str, str] | None = None,
) -> RunReport:
    """Report the last synchronised backward pass, as this rank saw it; not collective.

    Args:
        replication: ``model.replication``, see `partita.ddp.replicate`.
        title: the heading.
        subtitle: the line below it; empty: which rank it is, of how many.
        environment: names and values that describe where it ran.

    Raises:
        ReportError: no backward pass has been reduced in the present buckets.
    """
    backward = backward_pass(replication)
    nothing = Timeline("", (), 0.0, 0.0)
    return RunReport(
        title=title,
        subtitle=subtitle or f"The last backward pass, on rank {backward.rank} of {backward.ranks}",
        stages=(),
        losses=(),
        measured=nothing,
        simulated=nothing,
        figures=_figures(backward),
        environment=environment or {},
        backward=backward,
    )


def backward_pass(replication: Replication) -> BackwardPass:
    """Return the last synchronised backward pass, as data.

    Raises:
        ReportError: no backward pass has been reduced in the present buckets.
    """
    times = replication.last_pass
    rows = replication.rows()
    buckets = [
        ReducedBucket(
            row.bucket,
            row.parameters,
            row.bytes,
            row.dtype,
            row.ready_s,
            row.sent_s,
            row.finished_s,
            row.exposed_s,
        )
        for row in rows
        if row.sent_s is not None and row.finished_s is not None and row.exposed_s is not None
    ]
    if times is None or len(buckets) < len(rows):
        raise ReportError(
            "There are no times of the present buckets: take a step that reduces gradients, and report then."
        )
    comm = replication.comm
    return BackwardPass(comm.rank, comm.size, times.backward_end_s - times.started_s, tuple(buckets))


def _figures(backward: BackwardPass) -> tuple[Figure, ...]:
    exposed = format_share(backward.exposed_s / backward.end_s if backward.end_s else 0.0)
    averaged = f"averaged over {backward.ranks} ranks" if backward.ranks > 1 else "by one rank alone"
    return (
        Figure("Exposed communication", format_seconds(backward.exposed_s), note=f"{exposed} of the whole"),
        Figure("Backward pass", format_seconds(backward.backward_s), note="without waiting for means"),
        Figure("Buckets", len(backward.buckets), note=f"{backward.sent_early} sent before its end"),
        Figure("Reduced", format_bytes(backward.size_bytes), note=averaged),
    )
