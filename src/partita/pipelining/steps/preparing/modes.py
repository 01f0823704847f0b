"""The modes, training and evaluation, that the stages of a rank are in."""

from __future__ import annotations

from collections.abc import Collection

import torch

from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining.stages.stage import Stage

__all__ = ["follow_modes", "mode_name"]


def mode_name(stages: Collection[Stage]) -> str:
    """The mode that they are in, as messages call it."""
    modes = {stage.module.training for stage in stages}
    return "both modes" if len(modes) > 1 else "train mode" if modes.pop() else "eval mode"


def follow_modes(stages: Collection[Stage], *, train: bool) -> None:
    """Where a model takes another path in evaluation, let its stages exchange what they do in their mode.

    Args:
        train: whether gradients are to be computed.

    Raises:
        ExecutionError: gradients, in inference mode.
        SignatureMismatch: the stages of such a model are in both modes.
    """
    if train and torch.is_inference_mode_enabled():
        raise ExecutionError(
            "step() under torch.inference_mode() has no gradients: leave the block, or call eval()"
        )
    if all(stage.by_mode.evaluation is None for stage in stages):
        return
    if len({stage.module.training for stage in stages}) > 1:
        raise SignatureMismatch(
            "this rank's stages are in both modes, but the model takes another path in each: call "
            "train() or eval() on all of them"
        )
    for stage in stages:
        routes = stage.by_mode.in_mode(stage.module.training)
        if routes is not stage.routes:
            stage.follow(routes)
