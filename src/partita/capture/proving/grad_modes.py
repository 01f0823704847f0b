"""Evaluation without gradients. Most models compute the same with and without them; some do not::

    with torch.no_grad():
        if torch.is_grad_enabled(): ...         a way of the model's own for inference
        nn.TransformerEncoder(...)(x)           torch's fast path: other kernels, and zeros where a mask hides

A graph is traced with gradients, and does the same with and without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from partita.capture.merging.modes import add_check, mode_flag
from partita.capture.proving.forward_difference import forward_difference
from partita.capture.proving.samples import Sample
from partita.errors import CaptureError
from partita.verification.comparing.compare import Tolerance

__all__ = [
    "FAST_PATH_ADVICE",
    "GradModeDifference",
    "differ_by_fast_path",
    "difference_without_gradients",
    "explained",
    "has_fast_path",
    "refuse_without_gradients",
    "require_gradients",
]

_FAST = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_WITHOUT_FAST_PATH = (
    "call torch.backends.mha.set_fastpath_enabled(False) before the cut, and wherever the model runs"
)
FAST_PATH_ADVICE = f"that is torch's fast path for attention: {_WITHOUT_FAST_PATH}, and the two are equal"


@dataclass(frozen=True)
class GradModeDifference:
    """A graph, or a cut, that equals its model in evaluation with gradients, and differs from it without.

    Attributes:
        text: the difference, and what to do.
        rounding: whether the two are equal within a small tolerance.
        only_in_evaluation: whether they are sure to be equal in training.
    """

    text: str
    rounding: bool
    only_in_evaluation: bool = False


def difference_without_gradients(
    model: nn.Module, graph: GraphModule, sample: Sample, tolerance: Tolerance, small: Tolerance
) -> GradModeDifference | None:
    """Compare a graph with its model under ``torch.no_grad()``, both in evaluation; they are equal on the
    sample with gradients.

    Args:
        tolerance: within which they are equal.
        small: within which a difference counts as rounding.

    Returns:
        None where they are equal, or the model does not run without gradients.
    """

    def compare(within: Tolerance) -> str:
        with torch.no_grad():
            return forward_difference(model, graph, sample, within)

    advice = 'frontend="modules" cuts its own code, which asks for itself'
    return explained(type(model).__name__, model, compare, tolerance, small, advice)


def explained(
    name: str,
    model: nn.Module,
    compare: Callable[[Tolerance], str],
    tolerance: Tolerance,
    small: Tolerance,
    advice: str,
) -> GradModeDifference | None:
    """Return the difference without gradients, with its cause and what to do.

    Args:
        name: of the model.
        compare: compares under ``torch.no_grad()`` within a tolerance, and returns the difference as text.
        advice: where the cause is not torch's fast path.
    """
    difference = compare(tolerance)
    if not difference:
        return None
    rounding, fast_path = not compare(small), differ_by_fast_path(model, lambda: not compare(tolerance))
    if fast_path:
        advice = FAST_PATH_ADVICE
    elif has_fast_path(model):  # which may be in the graph, where forward itself switches gradients off
        advice = f"it may be torch's fast path for attention: {_WITHOUT_FAST_PATH}; or {advice}"
    text = (
        f"under torch.no_grad() {name} computes something else in evaluation than with gradients, and what "
        f"was made of it does not ({difference}): {advice}"
    )
    return GradModeDifference(text, rounding, only_in_evaluation=fast_path)


def has_fast_path(model: nn.Module) -> bool:
    """Whether torch has a fast path for a module of the model, and may take it."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    return enabled and any(isinstance(module, _FAST) for module in model.modules())


def differ_by_fast_path(model: nn.Module, are_equal: Callable[[], bool]) -> bool:
    """Whether torch's fast path for attention is what makes a model differ from what was made of it.

    Args:
        are_equal: compares the two.
    """
    if not has_fast_path(model):
        return False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return are_equal()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def refuse_without_gradients(graph: GraphModule, difference: GradModeDifference) -> None:
    """Let a graph, in place, raise an error where no gradients are recorded."""
    allowed = mode_flag(graph, "") if difference.only_in_evaluation else False
    add_check(graph, require_gradients, allowed, difference.text)


def require_gradients(allowed: bool, text: str) -> None:
    """Refuse to run where no gradients are recorded, unless that is allowed.

    Raises:
        CaptureError: with that text.
    """
    if not allowed and not torch.is_grad_enabled():
        raise CaptureError(text)
