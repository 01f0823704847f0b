"""What each kind of schedule takes, in torch's order and by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import PipelineStage, TensorChunkSpec, get_schedule_class
from partita.runtime import Comm, InProcessWorld

SEVERAL = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBH1", "ZBH2", "ZB2p")


@pytest.mark.parametrize("name", SEVERAL)
def test_options_are_taken_by_name(name: str) -> None:
    def run(comm: Comm) -> list[Tensor]:
        stage = PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"), comm=comm)
        options = {
            "args_chunk_spec": (TensorChunkSpec(1),),
            "kwargs_chunk_spec": {},
            "use_full_backward": True,  # has no effect, as in torch
            "scale_grads": False,
            "backward_requires_autograd": True,
        }
        schedule = get_schedule_class(name)([stage], 2, functional.mse_loss, **options)
        losses: list[Tensor] = []
        x = torch.ones(3, 4)
        schedule.eval(x, target_mbs=[torch.ones(3, 2), torch.zeros(3, 2)], losses=losses)
        return losses

    ((zero, one),) = InProcessWorld(1).run(run)
    assert (zero.item(), one.item()) == (0.0, 1.0)
