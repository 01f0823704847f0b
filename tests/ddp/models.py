"""Small models and batches, equal on every rank by their seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

WIDTH = 12


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(step: int, rank: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def mlp(blocks: int = 4) -> nn.Module:
    layers = [layer for _ in range(blocks) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Branching(nn.Module):
    """Uses one tower or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(mlp(2) for _ in range(3))
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.towers[self.which](x)


class Broken(nn.Module):
    """A graph break in the middle; the head is used on both sides of it."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        x = self.second(x).relu()
        return self.first(x) if self.tied else x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(x)).relu())


class Mixed(nn.Module):
    """Parameters of three data types."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.brief = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(x).relu()
        x = self.wide(x.double()).relu()
        return self.brief(x.bfloat16()).float()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.norm(self.body(x))


class Checkpointed(nn.Module):
    def __init__(self, *, whole: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.whole = whole
        self.reentrant = reentrant

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return checkpoint(self._all, x, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, 3)
        self.right = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.body(x).relu()
        return self.left(x), self.right(x), x.detach().mean()


def _earlier(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


def _nearer(score: torch.Tensor, _batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    return score + (key - query) * 0.1


class Flexible(nn.Module):
    """Two layers of FlexAttention with a block mask and a bias on the scores."""

    def __init__(self, tokens: int = 6) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mask = create_block_mask(_earlier, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        for into, out in zip(self.into, self.out, strict=True):
            parts = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in into(x).chunk(3, -1)]
            mixed = flex_attention(*parts, score_mod=_nearer, block_mask=self.mask)
            x = x + out(mixed.transpose(1, 2).flatten(-2))
        return x


class Mixer(nn.Module):
    """Convolutions, whose layout Inductor changes, and attention with three layers of its own. Their backward
    operators have several results, gradients of several parameters among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.MaxPool2d(3, 1, 1),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
        )
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(4 * WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolve(x.unflatten(-1, (1, 3, 4))).flatten(2)
        parts = [
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(1))


class Placed(nn.Module):
    """Adds what it has learnt of each place, which takes a sum over the batch in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 3, 4))
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body((x.unflatten(-1, (3, 4)) + self.places).flatten(1))


class WritesOn(nn.Module):
    """A compiled graph that returns nothing, and hands its result on in what it was given; a layer of it is
    used once more after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.first(x)
        torch._dynamo.graph_break()
        total.add_(self.shared(x))
        torch._dynamo.graph_break()
        return self.last(self.shared(total).relu())


class MovingMean(nn.Module):
    """Sets its buffers anew instead of writing to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rest = mlp(1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen = self.seen + 1
        return self.rest(x - self.mean)


class Transposed(nn.Module):
    """A parameter that is not contiguous, one with a single element, one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 50).t() / 10)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0))
        self.after = nn.Parameter(torch.randn(50, WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() @ self.after * self.scale + self.empty.sum()


def loss_of(result: Any) -> torch.Tensor:
    if isinstance(result, torch.Tensor):
        return result.square().mean()
    return sum((item.square().mean() for item in result), torch.zeros(()))
