from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import partita
from partita._torch.export.data_attribute import data_is_detached
from partita.capture import capture
from partita.errors import CaptureError


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))


class Reads(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * h.data.norm())


class Averages(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.mean.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
        return self.b(h - self.mean)


class Clips(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data.clamp_(-0.3, 0.3)
        return self.b(self.a(x))


class Decays(Layers):
    """Writes past autograd to what autograd has saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        self.b.weight.data.mul_(0.9)
        return y


class Replaces(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.b.bias.data = self.b.bias.data * 0.5
        return self.b(self.a(x))


def x(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [Reads, Averages, Clips])
def test_what_is_read_and_written_through_data_is_in_the_graph(kind: type[Layers]) -> None:
    model = kind()
    graph = capture(copy.deepcopy(model), (x(),), prove=True).module
    for seed in range(2):
        partita.verify(graph, model, (x(seed),)).check()
        graph(x(seed)), model(x(seed))


def test_what_autograd_must_not_see_is_refused() -> None:
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        capture(Decays(), (x(),), prove=True)


@pytest.mark.parametrize("inside", [False, True])
def test_other_data_are_refused_with_the_line(inside: bool) -> None:
    replaces = Replaces()
    model = nn.Sequential(nn.Linear(4, 4), replaces) if inside else replaces
    before = replaces.b.bias.data_ptr()
    line = r"self\.b\.bias\.data = self\.b\.bias\.data \* 0\.5.*write into it \(with torch\.no_grad\(\)"
    with pytest.raises(CaptureError, match=line) as refusal:
        capture(model, (x(),))
    assert "strict mode: CaptureError" in str(refusal.value)
    assert replaces.b.bias.data_ptr() == before


def test_without_a_tracer_data_is_what_it_is() -> None:
    value = torch.ones(2, requires_grad=True)
    with data_is_detached():
        value.data.mul_(3)
        value.data = torch.zeros(2)
    assert value.tolist() == [0.0, 0.0]
