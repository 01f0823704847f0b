"""Data parallel stages: gradients are reduced once a step, in the last of its backward passes.

Left to themselves, torch's wrappers would reduce after every microbatch, or, as forward and backward passes
interleave, in the wrong one::

    microbatch      0    1    2    3
    forward         F    F    F    F      quietly (DDP: under no_sync)
    backward        B    B    B    B!     only here gradients travel between the data parallel ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
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
from partita._torch.modules.contents import modules_in
from partita.errors import ExecutionError

__all__ = ["GradientReduction", "gradient_reduction", "replicas_among"]


def gradient_reduction(module: nn.Module) -> GradientReduction | None:
    """How the gradients of a stage's module are reduced; None where neither it nor a module in it is wrapped
    in ``DistributedDataParallel`` (under ``torch.compile`` or not), replicated by `partita.ddp.replicate`,
    or sharded with ``fully_shard``.

    Raises:
        ExecutionError: it is replicated in a way that can't be told when to reduce.
    """
    parts: Iterable[Any] = modules_in(module)
    if replicated_in_place(parts):
        raise ExecutionError(
            "the stage's module went through torch's composable replicate(), which reduces in every "
            "microbatch: wrap it in DistributedDataParallel, or fully_shard() it"
        )
    replicated, on_demand = replicas_among(parts)
    sharded = sharded_roots(module) if any(isinstance(part, FSDPModule) for part in parts) else []
    if not replicated and not on_demand and not sharded:
        return None
    return GradientReduction(module, replicated=replicated, on_demand=on_demand, sharded=sharded)


def replicas_among(parts: Iterable[Any]) -> tuple[list[DistributedDataParallel], list[Any]]:
    """Those of some modules that are ``DistributedDataParallel``, and those of `partita.ddp.replicate`."""
    replicated = [part for part in parts if isinstance(part, DistributedDataParallel)]
    return replicated, [part for part in parts if hasattr(type(part), "expect_backward")]


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
        replicated: Iterable[DistributedDataParallel] = (),
        on_demand: Iterable[ReducedOnDemand] = (),
        sharded: Iterable[FSDPModule] = (),
    ) -> None:
        self.module = module
        self._replicated = tuple(replicated)
        self._on_demand = tuple(on_demand)
        self._sharded = tuple(sharded)
        self._wanted = True
        self._left = 0

    @property
    def at_once(self) -> bool:
        """Whether a backward pass can't be cut into gradients of inputs and gradients of weights: a sharded
        module gives its gathered weights away as soon as its inputs have their gradients, a replicated one
        that looks for unused parameters wants the whole graph, and one on demand reduces whole passes.
        """
        unsure = any(ddp.find_unused_parameters or ddp.static_graph for ddp in self._replicated)
        return unsure or bool(self._on_demand) or not self._replicated

    @property
    def unwrapped(self) -> nn.Module:
        """The module inside a replicated one."""
        outer = getattr(self.module, "_orig_mod", self.module)
        inner: nn.Module = outer.module if isinstance(outer, DistributedDataParallel) else self.module
        return inner

    def check_recompute(self, stage: int) -> None:
        """Raise ExecutionError where a forward pass can't run again before the backward pass."""
        if self._sharded:
            raise ExecutionError(
                f"stage {stage} is sharded with fully_shard and is to be recomputed as a whole, which would "
                "gather its parameters once more: leave it out of recompute, and let its blocks call "
                "torch.utils.checkpoint"
            )
        if self._on_demand:
            raise ExecutionError(
                f"stage {stage} went through partita.ddp.replicate and is to be recomputed, which would "
                "count as another forward pass of the replicated module: wrap it in DistributedDataParallel, "
                "or leave it out of recompute"
            )
        if self.unwrapped is self.module:
            raise ExecutionError(
                f"stage {stage} has DistributedDataParallel around a part of it and is to be recomputed: "
                "wrap the stage's whole module, or leave it out of recompute"
            )
        if self._replicated[0] is not self.module:
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
        for ddp in self._replicated:
            if ddp.static_graph and microbatches > 1:
                raise ExecutionError(
                    f"DistributedDataParallel(static_graph=True) reduces in its first backward pass, and a "
                    f"step has {microbatches}, of which only the last may reduce: leave static_graph out"
                )
            ddp.require_forward_param_sync = True  # buffers, in the first forward pass
        self._wanted = all(
            [ddp.require_backward_grad_sync for ddp in self._replicated]
            + [replica.require_backward_grad_sync for replica in self._on_demand]
            + [reduces(module) for module in self._sharded]
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self._sharded:
            # A weight that autocast converted in an earlier microbatch would get its gradient after
            # `fully_shard` has reduced: autograd runs what was made first last.
            torch.clear_autocast_cache()
        with ExitStack() as quiet:
            for ddp in self._replicated:
                quiet.enter_context(ddp.no_sync())
            for replica in self._on_demand:
                quiet.enter_context(replica.no_sync())
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
        for ddp in self._replicated if last else ():
            expect_backward(ddp, outputs or ())
        for replica in self._on_demand if last else ():
            replica.expect_backward()
        for module in self._sharded:
            module.set_is_last_backward(not self._left)
            module.set_requires_gradient_sync(last)
        try:
            run()
        finally:
            for module in self._sharded:
                module.set_is_last_backward(True)
                module.set_requires_gradient_sync(self._wanted)
