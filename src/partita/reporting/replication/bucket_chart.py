"""The buckets of one backward pass as an SVG chart, a lane for each:

bucket 0   ·······████████████░░░░                    · ready, █ sent, ░ the rank waits
bucket 1           ···████████████░░░░
bucket 2                      ·███████░░
axis       0       5       10      15 ms
                          ¦ the end of the backward pass
"""

from __future__ import annotations

from partita.listing import first_few
from partita.reporting.drawing.scales import Scale
from partita.reporting.drawing.svg import Attribute, element, picture, text, title
from partita.reporting.drawing.time_axis import AXIS_HEIGHT, time_axis
from partita.reporting.drawing.units import format_bytes, format_seconds
from partita.reporting.replication.backward_pass import BackwardPass, ReducedBucket

__all__ = ["bucket_chart"]

_LEFT, _RIGHT, _TOP = 84.0, 18.0, 8.0
_MOST_NAMES = 12


def bucket_chart(backward: BackwardPass, *, width: float = 1040) -> str:
    """Draw the pass as one ``<svg>``, ``width`` pixels wide at its natural size.

    Resting the pointer on a bucket shows its times and the names in it.
    """
    scale = Scale(0.0, max(backward.end_s, 1e-9), _LEFT, width - _RIGHT)
    height = min(26.0, max(11.0, 400.0 / max(1, len(backward.buckets))))
    pitch = height + max(2.0, height * 0.25)
    bottom = _TOP + max(1, len(backward.buckets)) * pitch
    parts = [_bucket(bucket, scale, _TOP + n * pitch, height) for n, bucket in enumerate(backward.buckets)]
    x = scale(backward.backward_s)
    ends = {"x1": x, "x2": x, "y1": _TOP - 5, "y2": bottom}
    parts.append(element("line", {"class": "finish", **ends}, title("end of the backward pass")))
    parts.append(time_axis(scale, bottom))
    return picture(width, bottom + AXIS_HEIGHT, _description(backward), parts, "chart gantt buckets")


def _bucket(bucket: ReducedBucket, scale: Scale, y: float, height: float) -> str:
    size = min(12.0, height)
    anchor: dict[str, Attribute] = {"class": "quiet", "text-anchor": "end", "font-size": size}
    parts = [
        text(f"bucket {bucket.bucket}", _LEFT - 10, y + height / 2 + size * 0.35, anchor),
        _bar("lane", scale, scale.low, scale.high, y, height),
    ]
    if bucket.ready_s is not None and bucket.ready_s < bucket.sent_s:
        parts.append(_bar("held", scale, bucket.ready_s, bucket.sent_s, y + height * 0.4, height * 0.2))
    waited_s = max(bucket.sent_s, bucket.finished_s - bucket.exposed_s)
    parts.append(_bar("sent", scale, bucket.sent_s, waited_s, y, height))
    if bucket.exposed_s:
        parts.append(_bar("exposed", scale, waited_s, bucket.finished_s, y, height))
    return element("g", None, title(_tooltip(bucket)), *parts)


def _bar(name: str, scale: Scale, start_s: float, end_s: float, y: float, height: float) -> str:
    x = scale(start_s)
    drawn = max(0.5, scale(end_s) - x)  # what is too short to see is drawn half a pixel wide
    return element("rect", {"class": name, "x": x, "y": y, "width": drawn, "height": height})


def _tooltip(bucket: ReducedBucket) -> str:
    ready = "no gradient came" if bucket.ready_s is None else f"ready at {_ms(bucket.ready_s)}"
    return "\n".join(
        [
            f"bucket {bucket.bucket}: {format_bytes(bucket.size_bytes)} of {bucket.dtype}",
            f"{ready}, sent at {_ms(bucket.sent_s)}, mean known at {_ms(bucket.finished_s)}",
            f"exposed for {format_seconds(bucket.exposed_s)}",
            first_few(bucket.parameters, _MOST_NAMES),
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _description(backward: BackwardPass) -> str:
    return (
        f"{len(backward.buckets)} buckets of a backward pass of {format_seconds(backward.backward_s)}; "
        f"{format_seconds(backward.exposed_s)} of their reduction exposed."
    )
