"""Whether the gradients of a value that several stages use are added up in the order of the uncut model."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld


def check_against_eager(
    model: nn.Module, x: Tensor, where: Mapping[str, SplitPoint], *, compiled: bool
) -> None:
    """Train one step in two microbatches, cut and uncut; gradients are equal bit for bit."""
    pipe = pipeline(model, (x[: len(x) // 2],), split_spec=dict(where))

    def rank(comm: Comm) -> dict[str, Tensor]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        if compiled:
            stage.compile("aot_eager")
        Schedule1F1B(stage, 2, mse_loss).step(x, target=x)
        return {name: value.grad for name, value in stage.module.named_parameters() if value.grad is not None}

    gradients: dict[str, Tensor] = {}
    for result in reversed(InProcessWorld(pipe.num_stages).run(rank)):
        gradients |= result
    for sample in x.chunk(2):
        (mse_loss(model(sample), sample) / 2).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], parameter.grad), name
