from __future__ import annotations

import torch
from torch import Tensor, nn

import partita
from partita.pipelining import pipe_split, pipeline


class Unused(nn.Module):
    """Asks the same in two stages; what the first way of the first computes is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        _ = h if x.sum() > 0 else h.cumsum(1)
        pipe_split()
        return self.b(h if x.sum() > 0 else h.cumsum(1))


def test_what_a_branch_computes_for_nobody_stays_in_its_stage() -> None:
    model = Unused()
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == 2
    for sample in (x.abs(), -x.abs()):
        assert partita.verify(pipe, model, (sample,)).ok
