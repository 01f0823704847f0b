"""`capture`: a graph that runs like the model, in both modes, with the original names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule

from partita._torch.export.open_sizes import forget_sizes
from partita._torch.export.signature import Signature, signature_of
from partita.capture.attempts import Attempts
from partita.capture.merging.merge_modes import merge_modes
from partita.capture.merging.modes import add_check, captures_training, copy_flags, mode_flag, require_mode
from partita.capture.one_thread_at_a_time import one_thread_at_a_time
from partita.capture.open_sizes.batch import traceable_arguments
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.proving.proof import (
    UNASKED,
    Disproof,
    Proof,
    Prove,
    prove_batch_of_one,
    proven,
    tolerance_of,
)
from partita.capture.refusal import check_call, short_refusal
from partita.errors import CaptureError
from partita.verification.comparing.compare import Tolerance

__all__ = ["Captured", "Modes", "capture"]

Modes = Literal["both", "train", "eval"]


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        module: runs like the model and has the same parameter and buffer objects under their original names;
            ``train()`` and ``eval()`` work on it and on its submodules. ``Sizes.of(module)`` has its open
            sizes.
        signature: how arguments become placeholders, and outputs the model's own structure.
        both_modes: whether one graph serves both modes. If not, it raises an error in the other one.
        other: the graph for the other mode, if that needs one of its own and could be captured.
        reason: why there is no graph for the other mode.
        proof: whether the graphs were proven to be equal to the model.
    """

    module: GraphModule
    signature: Signature
    both_modes: bool
    other: Captured | None = None
    reason: str = ""
    proof: Proof = UNASKED

    def graphs(self) -> dict[bool, GraphModule]:
        """Return the graphs by mode: True for training."""
        if self.both_modes:
            return {True: self.module, False: self.module}
        modules = [self.module] if self.other is None else [self.module, self.other.module]
        return {captures_training(module): module for module in modules}


@one_thread_at_a_time()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    modes: Modes = "both",
    prove: Prove = False,
) -> Captured:
    """Capture ``model`` with ``torch.export``; the model itself does not change.

    Args:
        args: example arguments.
        kwargs: example keyword arguments.
        dynamic_shapes: which sizes stay open, as for ``torch.export``. None: the first dimension of every
            tensor that has the size of the batch, where the model allows it; else the graph is for the
            example's sizes, and ``Sizes.of(module).fixed`` says why. False: none.
        modes: ``"train"`` or ``"eval"`` to capture one mode only, whatever mode the model is in.
        prove: compare the graphs with the model itself, on the example and on other samples of its kind; see
            `partita.capture.proving.proof`. Where they differ, another way of tracing is tried.

    Raises:
        CaptureError: ``torch.export`` can't trace the model, or what it traces is not the model; the message
            shows its reason, the line of the model, and what to do.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    >>> captured = capture(model, (torch.randn(1, 2),))
    >>> captured.both_modes
    True
    >>> captured.module(torch.randn(5, 2)).shape
    torch.Size([5, 2])
    """
    check_call(model, args)
    if modes not in ("both", "train", "eval"):
        raise CaptureError(f"modes is {modes!r}: give 'both', 'train' or 'eval'")
    tolerance = tolerance_of(prove)
    attempts = Attempts(
        model,
        *traceable_arguments(args, kwargs or {}),
        dynamic_shapes,
        provable=tolerance is not None,
        both=modes == "both",
    )
    try:
        return _proven(attempts, modes, args, kwargs or {}, tolerance)
    finally:
        forget_sizes()


def _proven(
    attempts: Attempts,
    modes: Modes,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tolerance: Tolerance | None,
) -> Captured:
    model = attempts.model
    while True:
        captured = _captured(attempts, modes)
        graphs = captured.graphs()
        try:
            proof = proven(model, graphs, args, kwargs, tolerance)
            prove_batch_of_one(model, graphs, args, kwargs, proof, tolerance)
        except Disproof as error:
            attempts.reject(error)
        else:
            return replace(captured, proof=proof)


def _captured(attempts: Attempts, modes: Modes) -> Captured:
    model = attempts.model
    if modes != "both":
        reason = "only that mode was to be captured"
        return _single(model, attempts.export(modes == "train"), modes == "train", reason)
    graphs, reason = attempts.export_both()
    train, evaluation = graphs.get(True), graphs.get(False)
    if train is not None and evaluation is not None:
        sizes = Sizes.of(train).joined(Sizes.of(evaluation))
        if train is evaluation or merge_modes(train, evaluation, model):
            sizes.attach(train)
            copy_flags(model, train)
            return Captured(train, signature_of(train, model.forward), True)
    short = f"that mode can't be captured ({short_refusal(reason)})" if reason else ""
    by_mode = {training: _single(model, graph, training, short) for training, graph in graphs.items()}
    own = by_mode.get(model.training)
    if own is None:
        return next(iter(by_mode.values()))
    return replace(own, other=by_mode.get(not model.training), reason=reason)


def _single(model: nn.Module, module: GraphModule, training: bool, reason: str) -> Captured:
    """A graph for one mode, which checks the mode first."""
    add_check(module, require_mode, mode_flag(module, ""), training, reason)
    copy_flags(model, module)
    return Captured(module, signature_of(module, model.forward), False)
