"""CUDA-graph regions for the pieces that others have cut: a `PieceRunner`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from partita.cudagraphs.backend import CapturedGraph, CudaGraphsBackend
from partita.cudagraphs.replaying.input_memory import InputMemory

__all__ = ["CudaGraphsRunner"]


class CudaGraphsRunner:
    """Runs pieces by replaying recordings of them.

    All pieces of one runner record into the same memory and run one at a time: one runner for each rank.

    Args:
        options: see `BackendOptions`.

    A pipeline's stage: ``stage.module = runner.for_module(stage.module)``. A backward graph's piece:

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x: x.sin().cos().sin().cos().sin().cos(), tracing_mode="fake")(torch.zeros(2))
    >>> runner = CudaGraphsRunner(recorder="replay")
    >>> run = runner.for_graph(gm)
    >>> results = [run(torch.ones(2)) for _ in range(3)]
    >>> torch.equal(results[0], results[2]), len(runner.graphs)
    (True, 1)
    """

    def __init__(self, **options: Any) -> None:
        self._backend = CudaGraphsBackend(**options)

    @property
    def graphs(self) -> list[CapturedGraph]:
        """What has been captured so far: of modules once they have run, of graphs at once."""
        return self._backend.graphs

    @property
    def by_operator(self) -> bool:
        """Whether pieces are recorded as they are, without an ``inner`` compiler."""
        return self._backend.options.compiler is None

    def input_memory(self) -> InputMemory | None:
        """Memory for what one stage receives, which its recordings read where it lies; None where nothing is
        recorded.
        """
        return self._backend.input_memory() if self._backend.options.records else None

    def for_module(self, module: nn.Module) -> nn.Module:
        """``module`` compiled with the backend: forward and backward, in training and in evaluation mode."""
        compiled = torch.compile(module, backend=self._backend)
        assert isinstance(compiled, nn.Module)
        return compiled

    def for_graph(
        self, gm: GraphModule, *, fixed_inputs: Collection[str] = (), returned: int | None = None
    ) -> Callable[..., Any]:
        """The graph with its regions captured, run without gradients. Where there is nothing to record with
        (no GPU, and no recorder asked for), the graph as it is.
        """
        if not self._backend.options.records:
            return gm
        captured = self._backend.capture(gm, "piece", frozenset(fixed_inputs), returned)

        def run(*args: Any) -> Any:
            with torch.no_grad():
                return captured(*args)

        return run
