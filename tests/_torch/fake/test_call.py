from __future__ import annotations

import torch
from torch import nn

from partita._torch.fake.call import fake_call


def test_nothing_is_computed_and_no_buffer_changes() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    result = fake_call(module, [torch.randn(5, 4)])
    assert result.shape == (5, 3)
    assert int(module[0].num_batches_tracked) == 0
    assert type(module[1].weight) is nn.Parameter


def test_the_autocast_that_holds_counts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert fake_call(nn.Linear(2, 2), [torch.ones(1, 2)]).dtype == torch.bfloat16


def test_a_tied_parameter_stays_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> bool:
            return self.a.weight is self.b.weight

    assert fake_call(Tied(), [torch.ones(1)])


def test_a_child_that_is_registered_twice_keeps_its_parameters() -> None:
    """It was left with fake ones: a wrapper of Lightning's Fabric under autocast, whose weights were gone."""
    layer = nn.Linear(2, 2)
    module = nn.Sequential(layer, layer)
    fake_call(module, [torch.ones(1, 2)])
    assert type(layer.weight) is nn.Parameter
    assert type(layer.bias) is nn.Parameter
