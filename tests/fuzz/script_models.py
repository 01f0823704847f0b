"""Models for random training scripts: blocks of every kind that a cut can get wrong, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS", "LENGTH", "VOCABULARY", "ScriptModel"]

WIDTH, LENGTH, VOCABULARY = 8, 3, 11


class Attention(nn.Module):
    """With dropout of its weights, and a causal mask that is a buffer outside of the state dict."""

    mask: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        return x + h


class OverChannels(nn.Module):
    """A layer for (batch, channels, length)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return h


class Counter(nn.Module):
    """Writes to two buffers, and computes with what it has written."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
        return x + self.mean / self.calls


class Experts(nn.Module):
    """Two experts of which a router weighs the first choice, and a loss of its own left in a buffer."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("load", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = functional.one_hot(weights.argmax(-1), 2).to(weights.dtype)
        self.load.copy_(chosen.detach().float().mean((0, 1)))
        parts = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (parts * (weights * chosen).unsqueeze(-2)).sum(-1)


class LowRank(nn.Module):
    """A frozen layer beside two trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.base(x) + self.up(self.down(x))
        return h


class InPlace(nn.Module):
    """Writes to what it has computed, and to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        h[..., :2] *= 0.5
        return functional.relu_(h) + x


class Checkpointed(nn.Module):
    """The user's own activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return h + x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)[0]
        return h


class Normalised(nn.Module):
    """Torch's own parametrizations of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bounded = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.bounded(self.scaled(x).tanh())
        return h


BLOCKS: dict[str, Callable[[float], nn.Module]] = {
    "attention": Attention,
    "batch_norm": lambda _: OverChannels(nn.BatchNorm1d(WIDTH)),
    "checkpointed": lambda _: Checkpointed(),
    "conv": lambda _: OverChannels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "counter": lambda _: Counter(),
    "dropout": nn.Dropout,
    "experts": lambda _: Experts(),
    "in_place": lambda _: InPlace(),
    "layer_norm": lambda _: nn.LayerNorm(WIDTH),
    "low_rank": lambda _: LowRank(),
    "mlp": lambda _: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
    "normalised": lambda _: Normalised(),
    "recurrent": lambda _: Recurrent(),
}


class ScriptModel(nn.Module):
    """A language model of such blocks.

    Args:
        blocks: their kinds.
        dropout: how often it sets a value to zero.
        tied: the head's weight is the embedding's.
        skip: what the first block returns is added before the head too.
        again: the first block runs once more, before the head.
        own_loss: called with labels, it returns a dict with its loss.
    """

    def __init__(
        self, blocks: tuple[str, ...], *, dropout: float, tied: bool, skip: bool, again: bool, own_loss: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[kind](dropout) for kind in blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.skip, self.again, self.own_loss = skip, again, own_loss

    def forward(self, tokens: Tensor, labels: Tensor | None = None, *, scale: Tensor | None = None) -> Any:
        h = self.embedding(tokens)
        early = None
        for block in self.blocks:
            h = block(h)
            early = h if early is None else early
        if self.skip:
            h = h + early
        if self.again:
            h = self.blocks[0](h)
        if scale is not None:
            h = h * scale
        logits = self.head(h)
        if not self.own_loss:
            return logits
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}
