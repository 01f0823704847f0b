"""What looks on before a step says where the user has called it, through whatever wraps it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld


def _warnings(*, other_batch: bool = False, evaluate: bool = False) -> list[str]:
    """The files that the warnings of two steps point to."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2, functional.mse_loss)
        own = x + 1 if other_batch and comm.rank else x
        schedule.step(own, target=torch.zeros(4, 4))
        if evaluate:
            model.eval()
        schedule.step(own, target=torch.zeros(4, 4))

    with pytest.warns(UserWarning, match="another batch|eval mode") as seen:
        InProcessWorld(2).run(body)
    return [str(one.filename) for one in seen]


def test_warnings_point_to_the_call_of_the_step() -> None:
    assert _warnings(other_batch=True) == [__file__]
    assert _warnings(evaluate=True) == [__file__] * 2
