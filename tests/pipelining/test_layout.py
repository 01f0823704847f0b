"""Tensors that do not lie in memory in plain order cross borders so that sums keep their order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partita.pipelining import Pipe, Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.pipelining.layout import PLAIN, memory_order, room
from partita.runtime import Comm, InProcessWorld


class Permuted(nn.Module):
    """Like ConvNeXt: between its blocks pictures lie with their channels innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(16))
        self.b = nn.Linear(16, 16)
        self.c = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).permute(0, 2, 3, 1)
        x = self.scale * torch.tanh(self.b(x))
        x = self.c(x.permute(0, 3, 1, 2))
        return self.norm(x).mean((2, 3))


def _pipe(cut: str) -> tuple[Pipe, Tensor]:
    torch.manual_seed(0)
    model, x = Permuted(), torch.randn(8, 3, 9, 9)
    return pipeline(model, (x[:2],), split_spec={cut: SplitPoint.BEGINNING}), x


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("cut", ["b", "c", "norm"])
def test_permuted_values_and_gradients_cross_bit_for_bit(cut: str) -> None:
    pipe, x = _pipe(cut)
    target = torch.randn(8, 16)
    whole = copy.deepcopy(pipe.whole)
    expected = UncutReference(whole, 4, _loss).step(x, target=target)

    def body(comm: Comm) -> tuple[object, dict[str, Tensor]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        output = Schedule1F1B(stage, 4, _loss).step(x, target=target)
        return output, {name: value.grad for name, value in stage.module.named_parameters()}

    ranks = InProcessWorld(2).run(body)
    assert torch.equal(ranks[-1][0], expected)
    for name, value in whole.named_parameters():
        assert any(name in held and torch.equal(held[name], value.grad) for _, held in ranks), name


def test_what_crosses_says_how_it_lies_in_memory() -> None:
    pipe, _ = _pipe("b")
    assert [value.order for value in pipe.routes.values.values()] == [(0, 3, 1, 2)]


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(2, 3), PLAIN),
        (torch.empty(2, 3).t(), (1, 0)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(2, 1).expand(2, 3), PLAIN),
        (torch.empty(2, 8)[:, ::2], PLAIN),
        (torch.empty(0, 3).t(), PLAIN),
        (torch.empty(()), PLAIN),
    ],
)
def test_room_is_laid_out_like_the_tensor(tensor: Tensor, order: tuple[int, ...]) -> None:
    assert memory_order(tensor) == order
    made = room(tensor.shape, order, dtype=tensor.dtype)
    assert made.shape == tensor.shape
    if order:
        assert made.stride() == tensor.stride()
