"""The description of a `Pipe`, with all that a stage needs to know of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Graph

from partita._torch.export.signature import Signature
from partita.capture.proving.proof import UNASKED, Proof
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.loss import OutputLoss
from partita.pipelining.interface.routes import Routes
from partita.runtime.example_arguments import ExampleArguments

__all__ = ["PipeInfo"]


@dataclass(frozen=True)
class PipeInfo:
    """A description of a pipe that keeps none of its modules alive. As text (``str``, ``print``) it lists the
    stages, their parameters, and what crosses between them.

    Attributes:
        graph: the graph of the stitched module, which calls the stages one after the other.
        num_stages: how many there are.
        has_loss_and_backward: whether the model returns its loss (see ``loss_spec`` of `pipeline`).
        routes: what crosses the borders.
        signature: how the model's arguments and results are flattened; None where the stages are plain
            modules.
        loss: picks the loss out of the model's results, where ``loss_spec`` marks it or a dict has it under
            ``"loss"``.
        homes: the devices that the model was captured on.
        text: the listing.
        proof: whether the stages' graphs were compared with the model itself.
        recompute: the stages that are recomputed as a whole in the backward pass.
        compile_options: how the stages are compiled; None: not at all.
        example: the arguments that the model was cut with, by their structure and sizes.
    """

    graph: Graph = field(repr=False)
    num_stages: int
    has_loss_and_backward: bool
    routes: Routes = field(repr=False)
    signature: Signature | None = field(repr=False)
    loss: OutputLoss | None = field(repr=False)
    homes: frozenset[torch.device] = field(repr=False)
    text: str = field(repr=False)
    proof: Proof = UNASKED
    recompute: frozenset[int] = frozenset()
    compile_options: CompileOptions | None = None
    example: ExampleArguments | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text
