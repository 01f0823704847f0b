"""What the model's own code leaves in attributes, where stages run that code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import partita
from partita.pipelining import SplitPoint, pipeline


class Remembers(nn.Module):
    """Keeps what it has computed for a later call, as models that generate text do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.early = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.early = x.detach().sum(-1)
        x = self.b(x)
        return x


def test_an_attribute_lies_where_it_was_computed() -> None:
    model = nn.Sequential(Remembers())
    model(torch.randn(3, 4))
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"0.b": SplitPoint.BEGINNING}, frontend="modules")
    assert pipe.num_stages == 2
    assert partita.verify(pipe, model, (torch.randn(2, 4),)).ok
