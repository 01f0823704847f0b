"""Data parallel stages: gradients are reduced once a step, in the last of its backward passes.

Left to themselves, torch's wrappers would reduce after every microbatch, or, as forward and backward passes
interleave, in the wrong one::

    microbatch      0    1    2    3
    forward         F    F    F    F      quietly (DDP: under no_sync)
    backward        B    B    B    B!     only here gradients travel between the data parallel ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from partita._torch.distributed.gradient_sync import (
    expect_backward,
    reduces,
    replicated_in_place,
    sharded_roots,
)
from partita.errors import ExecutionError

__all__ = ["GradientReduction", "gradient_reduction"]


def gradient_reduction(module: nn.Module) -> GradientReduction | None:
    """How the gradients of a stage's module are reduced; None where it is neither wrapped in
    ``DistributedDataParallel`` (under ``torch.compile`` or not), nor replicated by `partita.ddp.replicate`,
    nor sharded with ``fully_shard``.

    Raises:
        ExecutionError: it is replicated in a way that can't be told when to reduce.
    """
    inner: Any = getattr(module, "_orig_mod", module)
    if isinstance(inner, DistributedDataParallel):
        return GradientReduction(module, replicated=inner)
    if hasattr(type(inner), "expect_backward"):
        return GradientReduction(module, on_demand=inner)
    if replicated_in_place(module):
        raise ExecutionError(
            "the stage's module went through torch's composable replicate(), which reduces in every "
            "microbatch: wrap it in DistributedDataParallel, or fully_shard() it"
        )
    sharded = sharded_roots(module)
    return GradientReduction(module, sharded=sharded) if sharded else None


class ReducedOnDemand(Protocol):
    """A replicated module that can be told to reduce its next backward pass: `partita.ddp.Replicated`."""

    require_backward_grad_sync: bool

    def no_sync(self) -> AbstractContextManager[None]: ...

    def expect_backward(self) -> None: ...


class GradientReduction:
    """Reduces the gradients of one stage: `begin` is called before each step, and each pass of the module
    goes through `forward` or `backward`.

    A user who asks for no reduction (``no_sync()``, ``set_requires_gradient_sync(False)``) around a step gets
    none, and accumulates over steps.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        replicated: DistributedDataParallel | None = None,
        on_demand: ReducedOnDemand | None = None,
        sharded: Iterable[FSDPModule] = (),
    ) -> None:
        self.module = module
        self._replicated = replicated
        self._on_demand = on_demand
        self._sharded = tuple(sharded)
        self._wanted = True
        self._left = 0

    @property
    def at_once(self) -> bool:
        """Whether a backward pass can't be cut into gradients of inputs and gradients of weights: a sharded
        module gives its gathered weights away as soon as its inputs have their gradients, a replicated one
        that looks for unused parameters wants the whole graph, and one on demand reduces whole passes.
        """
        ddp = self._replicated
        return ddp is None or ddp.find_unused_parameters or ddp.static_graph

    @property
    def unwrapped(self) -> nn.Module:
        """The module inside a replicated one."""
        inner: nn.Module = self.module if self._replicated is None else self._replicated.module
        return inner

    def check_recompute(self, stage: int) -> None:
        """Raise ExecutionError where a forward pass can't run again before the backward pass."""
        if self._sharded:
            raise ExecutionError(
                f"stage {stage} is sharded with fully_shard and is to be recomputed as a whole, which would "
                "gather its parameters once more: leave it out of recompute, and let its blocks call "
                "torch.utils.checkpoint"
            )
        if self._on_demand is not None:
            raise ExecutionError(
                f"stage {stage} went through partita.ddp.replicate and is to be recomputed, which would "
                "count as another forward pass of the replicated module: wrap it in DistributedDataParallel, "
                "or leave it out of recompute"
            )
        if self._replicated is not self.module:
            raise ExecutionError(
                f"stage {stage} is compiled around DistributedDataParallel and is to be recomputed: compile "
                "the module inside, DistributedDataParallel(torch.compile(module)), or leave one of them out"
            )

    def begin(self, microbatches: int) -> None:
        """Start a step of so many microbatches.

        Raises:
            ExecutionError: DDP counts hooks in its first pass, and there are several that it must not reduce.
        """
        self._left = microbatches
        if self._replicated is not None:
            if self._replicated.static_graph and microbatches > 1:
                raise ExecutionError(
                    f"DistributedDataParallel(static_graph=True) reduces in its first backward pass, and a "
                    f"step has {microbatches}, of which only the last may reduce: leave static_graph out"
                )
            self._wanted = self._replicated.require_backward_grad_sync
            self._replicated.require_forward_param_sync = True  # buffers, in the first forward pass
        elif self._on_demand is not None:
            self._wanted = self._on_demand.require_backward_grad_sync
        else:
            self._wanted = all(reduces(module) for module in self._sharded)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        replicated = self._replicated if self._on_demand is None else self._on_demand
        if replicated is None:
            # A weight that autocast converted in an earlier microbatch would get its gradient after
            # `fully_shard` has reduced: autograd runs what was made first last.
            torch.clear_autocast_cache()
            return self.module(*args, **kwargs)
        with replicated.no_sync():
            return self.module(*args, **kwargs)

    def backward(self, outputs: Sequence[Tensor] | None, run: Callable[[], object]) -> None:
        """Run a pass that adds to the gradients of weights; one for each microbatch.

        Args:
            outputs: what it starts from; None where it starts in the middle.
            run: the pass.

        Raises:
            ExecutionError: the last microbatch gives this stage no gradient, so nothing would be reduced.
        """
        self._left -= 1
        last = self._wanted and not self._left
        if outputs is not None and not outputs:
            trained = any(parameter.requires_grad for parameter in self.module.parameters())
            if last and trained:  # all may have been frozen since
                raise ExecutionError(
                    "the loss of the last microbatch does not depend on this stage, which is data parallel "
                    "and reduces its gradients then: leave that microbatch out, or let the loss use all "
                    "results"
                )
            return
        if self._replicated is not None:
            if last:
                expect_backward(self._replicated, outputs or ())
            run()
            return
        if self._on_demand is not None and last:
            self._on_demand.expect_backward()
        for module in self._sharded:
            module.set_is_last_backward(not self._left)
            module.set_requires_gradient_sync(last)
        try:
            run()
        finally:
            for module in self._sharded:
                module.set_is_last_backward(True)
                module.set_requires_gradient_sync(self._wanted)
