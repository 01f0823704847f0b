"""What is said of a model that can't be captured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from partita._torch.export.export import Way
from partita.capture.proving.proof import Disproof
from partita.capture.tracing.blame import users_line

__all__ = ["refusal", "short_refusal"]

_ADVICE = (
    "Take what can't be traced (.item(), data-dependent shapes, side effects on Python objects) out of "
    "forward, for example with torch.where or torch.cond; where the other mode can be traced, and is all "
    "that is needed, capture it alone: modes='eval' or modes='train'; or cut the model at its blocks and "
    'leave its code as it is: pipeline(..., frontend="modules"). The full text of the first error is '
    "attached as its cause"
)


def refusal(model: nn.Module, training: bool, reasons: Sequence[tuple[Way, Exception]]) -> str:
    """Return the message for a model that can't be captured in one mode.

    Args:
        reasons: why each way of tracing failed.
    """
    mode = "training" if training else "evaluation"
    lines = [f"torch.export can't capture {type(model).__name__}:"]
    disproved = False
    for way, error in reasons:
        text = str(error).strip().splitlines() or ["(no message)"]
        if isinstance(error, Disproof):
            disproved = True
            lines.append(f"  the graph that it traces is not the model: {text[0]}")
        else:
            line = users_line(error)
            place = f"{'strict' if way == 'strict' else 'non-strict'} mode{f', at {line}' if line else ''}"
            lines.append(f"  {place}: {type(error).__name__}: {text[0]}")
        lines += [f"    {more.strip()}" for more in text[1:5]]
    lines.append(f"(in {mode} mode.) {_ADVICE}")
    if disproved:
        lines.append(
            'Where such a difference is of no account: prove="close" (or a Tolerance) accepts small ones, '
            "prove=False all"
        )
    return "\n".join(lines)


def short_refusal(reason: str) -> str:
    """Return the one line of a refusal that says what stands in the way."""
    lines = [line.strip() for line in reason.splitlines()]
    return lines[1] if len(lines) > 1 else lines[0]
