"""Batch norms of a model that was captured: its graph computes them, and modules hold their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from partita.errors import ArgumentError

__all__ = ["hold_norms"]


class _HeldNorm(_BatchNorm):
    """Holds the tensors of a batch norm. Loops over modules take it for one, and what they would do to it has
    no effect on the graph: so it is refused.
    """

    forward = nn.Module.forward
    _load_from_state_dict = nn.Module._load_from_state_dict
    _version = nn.Module._version

    def __init__(self) -> None:
        """Never called: `hold_norms` gives the class to a module that is there."""
        super().__init__(0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "momentum":
            _refuse(f"momentum = {value!r}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "num_features":  # of which a batch norm of another kind is made
            _refuse("another kind of batch norm (convert_sync_batchnorm)")
        return super().__getattr__(name)

    def reset_running_stats(self) -> None:
        """Refused: see the class."""
        _refuse("reset_running_stats() (which update_bn calls)")

    def extra_repr(self) -> str:
        """Nothing: what a batch norm shows is in the graph."""
        return ""


def _refuse(what: str) -> NoReturn:
    raise ArgumentError(
        f"a batch norm of a captured stage gets {what}, which has no effect on the stage's graph: do it to "
        'the model before the cut, or cut with frontend="modules". Statistics can be computed anew with the '
        "model itself, whose buffers a pipe has too"
    )


def hold_norms(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Let the modules of captured stages that hold what a batch norm of ``model`` holds say so."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for stage in stages:
        for name, module in stage.named_modules():
            if name in norms and type(module) is nn.Module:
                module.__class__ = _HeldNorm
