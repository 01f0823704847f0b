"""The uncut model over the same microbatches: what a pipeline's step is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from partita.pipelining.stage import detached
from partita.runtime import RandomKey, keyed, merge, plan_microbatches, split_args

__all__ = ["UncutReference"]


class UncutReference:
    """Runs the whole captured graph over microbatches in order, gradients accumulated, random numbers by the pipeline's rule.

    A pipeline's step gives the same outputs, losses and gradients, bit for bit on CPU.

    Args:
        whole: ``Pipe.whole``, or what `keyed_graph` returns.
        n_microbatches: into how many the batch is cut.
        loss_fn: from (output, target) to one number.
        seed: of the random numbers.
    """

    def __init__(
        self, whole: GraphModule, n_microbatches: int, loss_fn: Callable[[Any, Any], Tensor] | None = None, *, seed: int = 0
    ) -> None:
        self.whole = whole
        self.n_microbatches = n_microbatches
        self.loss_fn = loss_fn
        self.seed = seed
        self._steps = 0

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward and backward of one batch; gradients are added to ``.grad``."""
        outputs, found = [], []
        parts = split_args(args, kwargs, self.n_microbatches)
        targets = split_args((target,), None, self.n_microbatches)
        weights = plan_microbatches(args, kwargs, self.n_microbatches).weights
        for microbatch, (part, aim, weight) in enumerate(zip(parts, targets, weights, strict=True)):
            with keyed(RandomKey(self.seed, self._steps, microbatch)):
                output = self.whole(*part[0], **part[1])
            assert self.loss_fn is not None
            loss = self.loss_fn(output, aim[0][0])
            torch.autograd.backward(loss, torch.full_like(loss, weight))
            outputs.append(output)
            found.append(loss.detach())
        self._steps += 1
        if losses is not None:
            losses.clear()
            losses.extend(found)
        return merge([detached(output) for output in outputs])

