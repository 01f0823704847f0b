"""What the tests record with, and a model that makes replays hard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita.cudagraphs import CudaGraphsBackend, ReplayRecorder, SavingModel


class AllWorthIt(SavingModel):
    """Captures every region."""

    def is_worth_it(self, launches: int, copies: int = 0, copied_bytes: int = 0) -> bool:
        return True


def capturing(**options: Any) -> CudaGraphsBackend:
    return CudaGraphsBackend(**{"recorder": "replay", "saving": AllWorthIt(), **options})


class CountingRecorder(ReplayRecorder):
    """Notes the shapes of the inputs that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[int, ...]] = []

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        self.copied.append(tuple(like.shape))
        return super().buffer(like)


class Net(nn.Module):
    """Everything that makes a replay hard: random numbers, running statistics, a node that can't be
    captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.4)
        self.table = nn.Embedding(10, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x) + self.table(index)))
        ordered = torch.linalg.svd(hidden.detach())[1].sum()  # waits for the device
        return self.last(hidden.relu() + ordered)


def batch(step: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator), torch.randint(10, (rows,), generator=generator)


def assert_same_state(first: nn.Module, second: nn.Module) -> None:
    for (name, ours), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
