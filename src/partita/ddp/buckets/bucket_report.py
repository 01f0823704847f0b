"""What the buckets are, and what became of them in a step: as data, as a table, in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partita._torch.tensors.tensor_text import short_name
from partita.listing import first_few

if TYPE_CHECKING:
    from partita.ddp.buckets.bucket_layout import BucketLayout
    from partita.ddp.buckets.sparse_reduction import AnyReduction
    from partita.runtime import Recorder

__all__ = ["BucketRow", "BucketTimes", "PassTimes", "bucket_rows", "bucket_table", "record_spans"]


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one backward pass; seconds from its start.

    Attributes:
        ready_s: its last gradient was there; None where no gradient came.
        sent_s: its reduction started.
        finished_s: its mean was known to be there.
        exposed_s: how long the rank waited for it with nothing else to do.
    """

    ready_s: float | None
    sent_s: float
    finished_s: float
    exposed_s: float

    @classmethod
    def of(cls, reduction: AnyReduction, ready_s: Mapping[int, float], started_s: float) -> BucketTimes:
        """From a finished reduction; ``ready_s`` and ``started_s`` are times of the clock."""
        ready = [ready_s[slot.index] for slot in reduction.layout.slots if slot.index in ready_s]
        return cls(
            max(ready) - started_s if ready else None,
            reduction.sent_s - started_s,
            reduction.finished_s - started_s,
            reduction.exposed_s,
        )


@dataclass(frozen=True)
class PassTimes:
    """One synchronised backward pass.

    Attributes:
        started_s: on the monotonic clock.
        backward_end_s: likewise: all gradients were there.
        buckets: in order.
        ready_s: for each parameter, seconds from the start until its gradient was there.
    """

    started_s: float
    backward_end_s: float
    buckets: tuple[BucketTimes, ...]
    ready_s: Mapping[str, float]

    @classmethod
    def of(
        cls,
        reductions: Sequence[AnyReduction],
        ready_s: Mapping[int, float],
        names: Sequence[str],
        started_s: float,
        backward_end_s: float,
    ) -> PassTimes:
        """From finished reductions; ``ready_s`` is by parameter; all times are of the clock."""
        return cls(
            started_s,
            backward_end_s,
            tuple(BucketTimes.of(reduction, ready_s, started_s) for reduction in reductions),
            {names[index]: ready - started_s for index, ready in ready_s.items()},
        )

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hid, in seconds."""
        return sum(bucket.exposed_s for bucket in self.buckets)


@dataclass(frozen=True)
class BucketRow:
    """One line of the table. Times are None before the first synchronised backward pass."""

    bucket: int
    parameters: tuple[str, ...]
    bytes: int
    dtype: str
    ready_s: float | None = None
    sent_s: float | None = None
    exposed_s: float | None = None
    finished_s: float | None = None


def bucket_rows(buckets: Sequence[BucketLayout], times: PassTimes | None) -> tuple[BucketRow, ...]:
    """Return the table as data."""
    rows = []
    for bucket in buckets:
        text = short_name(bucket.dtype)
        one = times.buckets[bucket.number] if times and len(times.buckets) == len(buckets) else None
        measured = (one.ready_s, one.sent_s, one.exposed_s, one.finished_s) if one else ()
        rows.append(BucketRow(bucket.number, bucket.names, bucket.size_bytes, text, *measured))
    return tuple(rows)


def record_spans(tracer: Recorder, reductions: Sequence[AnyReduction]) -> None:
    """Record a span for each bucket from sending to its mean, and one for each wait."""
    for reduction in reductions:
        number, size = reduction.layout.number, reduction.layout.size_bytes
        tracer.add(f"bucket {number}", "reduce", reduction.sent_s, reduction.finished_s, bytes=size)
        if reduction.exposed_s:
            start_s = reduction.finished_s - reduction.exposed_s
            tracer.add(f"wait for bucket {number}", "exposed", start_s, reduction.finished_s)


def bucket_table(rows: Sequence[BucketRow]) -> str:
    """Return the table as text, times in milliseconds."""
    lines = [f"{'bucket':>6}  {'bytes':>12}  {'ready':>9}  {'sent':>9}  {'exposed':>9}  parameters"]
    for row in rows:
        times = "  ".join(f"{_ms(value):>9}" for value in (row.ready_s, row.sent_s, row.exposed_s))
        lines.append(
            f"{row.bucket:>6}  {row.bytes:>12,}  {times}  {first_few(row.parameters, 3)} ({row.dtype})"
        )
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"
