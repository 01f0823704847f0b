"""Cutting a model between its own submodules without capturing them: ``pipeline(frontend="modules")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from partita.errors import CaptureError
from partita.pipelining.cutting.block_trace import Binding, trace_blocks
from partita.pipelining.cutting.chain import chain_of
from partita.pipelining.cutting.cuts import SplitPoint, cuts_at_annotations, find_submodule, stage_assignment
from partita.pipelining.cutting.module_pipe import ModulePipe
from partita.pipelining.loss import LossSpec

__all__ = ["cut_modules"]


def cut_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    points: Mapping[str, Sequence[SplitPoint]],
    loss_spec: LossSpec | None,
) -> ModulePipe:
    """Cut ``model`` where its ``forward`` calls these submodules.

    Each block stays the user's own module and runs its own code, whatever that does. What is between the
    blocks (the loop over a ``ModuleList``, a residual connection) is followed without data; where that can't
    be done, or not in the same way for training and evaluation, it is refused.

    Args:
        points: by qualified name.

    Raises:
        AttributeError: there is no submodule of that name.
        CaptureError: what is between the blocks depends on data or on the mode; or a block with buffers runs
            in two stages.
    """
    for path in points:
        find_submodule(model, path)
    binding = Binding.of(model, args, kwargs)
    outer = {path.rpartition(".")[0] for path in points if "." in path}
    opened = {
        ".".join(path.split(".")[: length + 1]) for path in outer for length in range(path.count(".") + 1)
    }
    whole = trace_blocks(model, binding, opened)
    if not any(node.op == "call_module" for node in whole.graph.nodes):
        raise CaptureError(
            f"{type(model).__name__}.forward calls no submodule that could be a block: leave "
            'frontend="modules" out'
        )
    assignment = stage_assignment(whole, cuts_at_annotations(whole, model, points))
    return ModulePipe(
        model, chain_of(whole, assignment, model), binding, binding.bind(args, kwargs), loss_spec
    )
