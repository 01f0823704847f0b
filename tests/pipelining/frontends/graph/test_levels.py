"""Models that call vmap are cut around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.errors import CaptureError
from partita.pipelining import SplitPoint, pipeline


class Ensemble(nn.Module):
    """Three heads at once, as in torch's tutorial on ensembles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(2, 2)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2, 4)), nn.Parameter(torch.randn(3, 2))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)

        def head(weight: Tensor, bias: Tensor) -> Tensor:
            return self.act(nn.functional.linear(x, weight, bias)) * 2

        return self.last(torch.func.vmap(head)(self.weight, self.bias).mean(0))  # type: ignore[no-any-return]


def test_no_planned_cut_lies_within_a_vmap() -> None:
    """The plan cut there: measuring raised torch's error, and left the level open for all that followed."""
    torch.manual_seed(0)
    model, x = Ensemble(), torch.randn(2, 4)
    pipe = pipeline(model, (x,), stages=4)
    assert pipe.num_stages == 4
    partita.verify(pipe, model, (x,), explain=False).check()


def test_a_cut_within_a_vmap_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"cut between 'tanh' and 'mul' lies within a transform of torch"):
        pipeline(Ensemble(), (torch.randn(2, 4),), split_spec={"act": SplitPoint.END})
