"""Small models that no graph can hold: each does in Python what a tracer can't follow."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Blocks(nn.Module):
    """Four linear layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)


class ToList(Blocks):
    """Reads numbers with ``tolist`` and ``int``; one loop runs as often as data says."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        steps = [int(value * 3) % 4 for value in x[:, 0].tolist()]
        kept = []
        for number, block in enumerate(self.blocks):
            x = block(x) + steps[number % len(steps)]
            for _ in range(int(x.abs().sum()) % 4):
                x = x.tanh()
            kept.append(x)
        return self.head(sum(kept)), kept


class Indexed(Blocks):
    """Indexes by data: what crosses has another size for each batch."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = (x > 0).nonzero(as_tuple=True)
        picked = x[places] * 2
        for block in self.blocks:
            x = block(x)
        return {"out": self.head(x).index_put(places, picked), "picked": picked}


class Drawn(Blocks):
    """Leaves blocks out by Python's random numbers, scales by numpy's, and drops out."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            if random.random() < 0.6:
                x = block(x)
            if np.random.rand() < 0.5:
                x = x * 2
            x = functional.dropout(x, 0.3, self.training)
        return self.head(x)


class Cache:
    """What blocks pass on besides their results."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self.about = {"count": 0}

    def update(self, value: Tensor) -> Tensor:
        self.items.append(value)
        self.about["count"] += 1
        return torch.stack(self.items).sum(0) / self.about["count"]


class Cached(Blocks):
    """A cache object goes through all blocks and is returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        cache = Cache()
        for block in self.blocks:
            x = cache.update(block(x))
        return self.head(x), cache


class Counting(Blocks):
    """Counts its calls before the cuts, where all stages count alike."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.settings["calls"] += 1
        for block in self.blocks:
            x = block(x) * self.settings["calls"]
        return self.head(x)


class Normed(Blocks):
    """Batch normalisation, and a way that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
            x = x if bool(x[0, 0] > 0) else x * 2
        return self.head(x)


class Tied(Blocks):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.blocks[0].weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum().item() > -1e9 else x
        return self.head(x)


class WritesInPlace(Blocks):
    """Writes to a value that it made before a cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](x))
        y = h * 1
        z = self.blocks[2](y.clone())
        y += 1
        z = self.blocks[3](z)
        y.mul_(2)
        return self.head(z) + y


class Flip(torch.autograd.Function):
    """Turns gradients around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Reversed(Blocks):
    """A custom function whose result crosses a cut, and a mask that ``vmap`` makes."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.vmap(lambda row: row.sum() > 0)(x)
        x = self.blocks[0](x)
        y = Flip.apply(x)
        for block in self.blocks[1:]:  # type: ignore[index]
            y = block(y) * mask[:, None]
        return self.head(y) + x


class OnTheStack(Blocks):
    """Values that no variable holds when a cut comes."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.blocks
        return self.head(blocks[0](x).exp() * 0.01 + blocks[2](blocks[1](x.tanh())) * blocks[3](x))


class Frozen(Blocks):
    """The first half runs without gradients; devices are read off the model's first parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](x))
        x = x + torch.ones(WIDTH, device=next(self.parameters()).device, dtype=next(self.parameters()).dtype)
        return self.head(self.blocks[3](self.blocks[2](x)))


class Branching(Blocks):
    """Uses a value from before a cut only where data says so."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        side = first.exp()
        h = self.blocks[2](self.blocks[1](first))
        if x.sum() > 0:
            h = h + side
        return self.head(self.blocks[3](h))


class WithLoss(Blocks):
    """Computes its loss on what labels pick."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        loss = None if labels is None else functional.cross_entropy(x[labels >= 0], labels[labels >= 0])
        return {"loss": loss, "out": x}


class CountsBehind(Blocks):
    """What it reads before the cuts it changes behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.calls
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(x)


class WritesToView(Blocks):
    """Writes to a view, behind a cut, of what it uses behind another."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        y = h * 1
        part = y[:2]
        h = self.blocks[2](self.blocks[1](h))
        part.add_(1)
        return self.head(self.blocks[3](h)) + y


class WritesToArgument(Blocks):
    """Writes to what it was called with, and lets go of it, behind a cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](x.clone()))
        x = self.blocks[2](h) + x.mul_(2)
        return self.head(self.blocks[3](x))


class Recomputed(Blocks):
    """Cuts would lie within what it computes again."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


RIGHT = (
    *(ToList, Indexed, Drawn, Cached, Counting, Normed, Tied, WritesInPlace, Reversed, OnTheStack, Frozen),
    Branching,
)
"""Those that are cut and compute what they compute whole."""
