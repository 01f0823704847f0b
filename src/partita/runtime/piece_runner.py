"""The interface by which one way of running pieces serves every reason to cut.

A pipeline has stages, data parallel has pieces of a backward graph; a piece runner makes of either something
that is called in the same way and does the same, but runs differently (recorded as CUDA graphs, for
example)::

    pipelining   a stage's module        ── for_module ──> a module, differentiable
    ddp          a flat backward graph   ── for_graph  ──> a function of the same inputs

So the packages that cut and those that run don't import each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.fx import GraphModule

__all__ = ["OperatorRunner", "PieceRunner", "PlainRunner", "ReceiveMemory", "RunnerWithMemory"]


@runtime_checkable
class PieceRunner(Protocol):
    """Decides how a piece runs; what it computes stays the same, bit for bit.

    A runner may serve many pieces. They run one at a time.
    """

    def for_module(self, module: nn.Module) -> nn.Module:
        """Return a module that runs in the place of ``module``, with the same parameters (the same objects),
        in training and in evaluation mode, forward and backward.
        """
        ...

    def for_graph(
        self, gm: GraphModule, *, fixed_inputs: Collection[str] = (), returned: int | None = None
    ) -> Callable[..., Any]:
        """Return a function of the same inputs that does what a flat graph of operators does, without
        gradients.

        Args:
            gm: functional but for writes to its inputs; its nodes have example values (``meta["val"]``). It
                is not changed.
            fixed_inputs: names of the inputs that mostly lie at the same address at each call (parameters,
                buffers). A hint: wherever they lie, the result is right.
            returned: how many of the outputs the caller keeps for long; those behind them are given back
                before the next call as a rule. A hint too. By default all are kept.
        """
        ...


class ReceiveMemory(Protocol):
    """Memory for what one stage receives, at addresses that its pieces read."""

    def empty(
        self,
        microbatch: Hashable,
        name: Hashable,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        begins: bool = True,
    ) -> torch.Tensor:
        """Return uninitialised memory for one input of a microbatch, that nobody else uses.

        Args:
            begins: whether the stage's work on the microbatch begins with this input.
        """
        ...


@runtime_checkable
class RunnerWithMemory(PieceRunner, Protocol):
    """A runner whose pieces are best given their inputs at addresses that stay."""

    def input_memory(self) -> ReceiveMemory | None:
        """Return such memory for one stage; None where any will do."""
        ...


@runtime_checkable
class OperatorRunner(PieceRunner, Protocol):
    """A runner that says whether it runs operator by operator. What does takes inputs with other strides than
    those of the example values, as eager mode does, and graphs that draw random numbers in place, into new
    memory; compiled code may not.
    """

    @property
    def by_operator(self) -> bool:
        """Whether it does."""
        ...


class PlainRunner:
    """Runs pieces as they are, and remembers which it was given: the fake for tests.

    Attributes:
        modules: given to `for_module`.
        graphs: given to `for_graph`.

    >>> runner = PlainRunner()
    >>> stage = nn.Linear(2, 2)
    >>> runner.for_module(stage) is stage, len(runner.modules)
    (True, 1)
    """

    by_operator = True

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.graphs: list[GraphModule] = []

    def for_module(self, module: nn.Module) -> nn.Module:
        """Return the module itself."""
        self.modules.append(module)
        return module

    def for_graph(
        self,
        gm: GraphModule,
        *,
        fixed_inputs: Collection[str] = (),  # noqa: ARG002
        returned: int | None = None,  # noqa: ARG002
    ) -> Callable[..., Any]:
        """Return the graph itself."""
        self.graphs.append(gm)
        return gm
