"""A part of a stage's graph that is recomputed by itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.graph_module.lazy_module import LazyGraphModule
from partita.pipelining.recompute.checkpointing import Checkpointing

__all__ = ["CheckpointedRegion"]


@final
class CheckpointedRegion(nn.Module):
    """Keeps only what it is called with, and runs again as soon as the backward pass needs it. Its backward
    pass computes the gradients of weights together with those of inputs, so that nothing of it is left then.

    Args:
        body: without state: parameters and buffers are arguments.
        where: what it is, for messages.
        written: the positions of the arguments that it, or the stage around it, writes to.
    """

    def __init__(self, body: GraphModule, where: str, written: Collection[int]) -> None:
        super().__init__()
        self.body = body
        self._checkpointing = Checkpointing(where, on_demand=True, written=written)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *operands: Any) -> Any:
        """Run the region; with gradients enabled its inputs are kept in place of what it computes."""
        if not torch.is_grad_enabled():
            return self._run(*operands)
        devices = (operand.device for operand in operands if isinstance(operand, Tensor))
        device = next(devices, torch.device("cpu"))
        return self._checkpointing.run(self._run, operands, {}, self._run, device)[0]

    def _run(self, *operands: Any) -> Any:
        if isinstance(self.body, LazyGraphModule):
            return LazyGraphModule.__call__(self.body, *operands)
        return self.body(*operands)
