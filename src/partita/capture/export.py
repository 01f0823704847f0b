"""From a model to a graph that runs like it, in both modes, with the original names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from partita._torch.export import Signature, export_module, signature_of
from partita.capture.merge import merge_modes
from partita.capture.modes import copy_flags, in_mode, mode_flag, require_mode
from partita.capture.regions import settle_regions
from partita.errors import CaptureError

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        module: runs like the model and holds the same parameter and buffer objects under their original
            names; ``train()`` and ``eval()`` work on it and on its submodules.
        signature: how arguments become placeholders, and outputs the model's own structure.
        both_modes: whether one graph serves both modes. If not, running it in the other one is refused with
            an error.
    """

    module: GraphModule
    signature: Signature
    both_modes: bool


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Captured:
    """Capture ``model`` with ``torch.export``; the model is as it was afterwards.

    Args:
        args: example arguments, with the shapes that the graph will be run with.
        kwargs: example keyword arguments.

    Raises:
        CaptureError: ``torch.export`` can't trace the model; the message shows its reason and what to do.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    >>> captured = capture(model, (torch.randn(1, 2),))
    >>> captured.both_modes
    True
    """
    if not isinstance(args, tuple):
        raise CaptureError(
            f"args is a tuple of positional arguments, got {type(args).__name__}: write (x,) for a single one"
        )
    training = model.training
    module = _export(model, args, kwargs, training=True)
    other = _export(model, args, kwargs, training=False)
    both = merge_modes(module, other, model)
    if not both:
        module = module if training else other
        _restrict(module, training)
    copy_flags(model, module)
    return Captured(module, signature_of(module, model.forward), both)


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, training: bool
) -> GraphModule:
    """Export in one mode: non-strict first, since it follows Python as it is; strict (bytecode) where that
    fails.
    """
    reasons = []
    for strict in (False, True):
        try:
            with torch.enable_grad(), in_mode(model, training):
                module = export_module(model, args, kwargs or {}, strict=strict)
        except Exception as error:  # torch.export raises dozens of kinds
            reasons.append((strict, error))
            continue
        settle_regions(module)
        return module
    raise CaptureError(_message(model, reasons)) from reasons[0][1]


def _restrict(module: GraphModule, training: bool) -> None:
    """Make the graph check its mode first."""
    flag = mode_flag(module, "")
    with module.graph.inserting_after(flag):
        module.graph.call_function(require_mode, (flag, training))
    module.recompile()


def _message(model: nn.Module, reasons: list[tuple[bool, Exception]]) -> str:
    lines = [f"torch.export can't capture {type(model).__name__}:"]
    for strict, error in reasons:
        text = str(error).strip().splitlines() or ["(no message)"]
        lines.append(f"  {'strict' if strict else 'non-strict'} mode, {type(error).__name__}: {text[0]}")
        lines += [f"    {line}" for line in text[1:4]]
    lines.append(
        "Take what can't be traced (data-dependent branches, .item(), side effects on Python objects) out of "
        "forward, for example with torch.where or torch.cond; the full text of the first error is attached "
        "as its cause"
    )
    return "\n".join(lines)
