from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.pipelining.frontends.modules.costs import block_costs
from partita.pipelining.frontends.modules.recording import record


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        for number in (x.sum(-1) > 0).long().unique().tolist():
            x = self.experts[number](x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def borders(stages: int | None) -> list[str]:
    torch.manual_seed(0)
    model = Model()
    recording = record(model, (torch.randn(3, 4),), {}, training=True, grad=True)
    return [path for path, _, _ in block_costs(model, recording, stages)[1]]


def test_blocks_are_members_of_lists_and_what_lies_in_them_where_these_are_few() -> None:
    outer = [f"layers.{number}" for number in range(4)]
    assert borders(2) == outer
    finer = borders(4)
    assert set(finer) == {*outer, *(f"layers.{number}.parts.1" for number in range(4))}


def test_experts_are_no_blocks_until_nothing_else_is_left() -> None:
    assert not any("experts" in path for path in borders(9))
    assert any("experts" in path for path in borders(10))
