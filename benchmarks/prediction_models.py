"""Small models of ten kinds to train in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "UNEVEN", "Subject"]


@dataclass(frozen=True)
class Subject:
    """A model with one microbatch.

    Attributes:
        args: its arguments.
        loss_fn: from what it returns and `target`.
    """

    model: nn.Module
    args: tuple[Tensor, ...]
    loss_fn: Callable[[Any, Tensor], Tensor]
    target: Tensor


class _Block(nn.Module):
    """A transformer block with the normalisation in front."""

    def __init__(self, width: int, heads: int, *, gated: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.gated = heads, causal, gated
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, (6 if gated else 4) * width)
        self.down = nn.Linear((3 if gated else 4) * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.up(self.second(x))
        if self.gated:
            gate, value = h.chunk(2, -1)
            return x + self.down(functional.silu(gate) * value)
        return x + self.down(functional.gelu(h))


class _Decoder(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int, length: int, *, gated: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(_Block(width, 4, gated=gated) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _EncoderDecoder(nn.Module):
    """The decoder's blocks all look at what the encoder returns."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(_Block(width, 4, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Block(width, 4) for _ in range(layers))
        self.across = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        source = target = self.tokens(tokens)
        for block in self.encoder:
            source = block(source)
        for block, across in zip(self.decoder, self.across, strict=True):
            target = block(target) + across(torch.cat((target, source), -1))
        return self.head(target)


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, 1 if channels == out else 2, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(h)) + self.skip(x)).relu()


class _Patches(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(_Block(width, 4, causal=False) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class _UNet(nn.Module):
    """Down and up again; what each level puts out goes across to the same level on the other side."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.start, self.end = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(_Residual(one, two) for one, two in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(two, one, 2, 2) for one, two in pairwise(widths))
        self.join = nn.ModuleList(nn.Conv2d(2 * one, one, 3, 1, 1) for one in widths[:-1])

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.start(image)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat((up(x), levels.pop()), 1)).relu()
        return self.end(x)


class _Merge(nn.Module):
    """Four neighbouring patches become one that is twice as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return self.reduce(self.norm(x.reshape(batch, length // 4, 4 * width)))


class _Swin(nn.Module):
    """Blocks in levels of which each has a quarter of the patches and twice the width."""

    def __init__(self, width: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        blocks: list[nn.Module] = []
        for level, count in enumerate(layers):
            blocks += [_Merge(width << (level - 1))] if level else []
            blocks += [_Block(width << level, 4, causal=False) for _ in range(count)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width << (len(layers) - 1), 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(image).flatten(2).transpose(1, 2)).mean(1))


def _of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _text(model: Callable[..., nn.Module], *sizes: Any, vocabulary: int, **options: Any) -> Subject:
    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (2, 128))
    return Subject(model(*sizes, **options), (tokens,), _of_tokens, tokens)


def _gpt(quick: bool) -> Subject:
    layers = 2 if quick else 6
    return _text(_Decoder, 256, layers, 8000, 128, vocabulary=8000, gated=False)


def _llama(quick: bool) -> Subject:
    layers = 2 if quick else 6
    return _text(_Decoder, 256, layers, 16000, 128, vocabulary=16000, gated=True)


def _t5(quick: bool) -> Subject:
    return _text(_EncoderDecoder, 256, 1 if quick else 3, 8000, vocabulary=8000)


def _vit(quick: bool) -> Subject:
    torch.manual_seed(0)
    model = _Patches(256, 2 if quick else 8)
    return Subject(model, (torch.randn(4, 3, 64, 64),), functional.cross_entropy, torch.arange(4))


def _convolutions(quick: bool, blocks: int) -> Subject:
    torch.manual_seed(0)
    widths = [16, *(16 << level for level in range(4) for _ in range(1 if quick else blocks))]
    layers = [_Residual(one, two) for one, two in pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)
    )
    return Subject(model, (torch.randn(8, 3, 32, 32),), functional.cross_entropy, torch.arange(8))


def _mlp(width: int, rows: int, layers: int) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))
    return Subject(model, (torch.randn(rows, width),), functional.mse_loss, torch.randn(rows, width))


def _u_net(quick: bool) -> Subject:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 64, 64)
    return Subject(_UNet(8 if quick else 16, 3 if quick else 4), (image,), functional.mse_loss, image)


def _swin(quick: bool) -> Subject:
    torch.manual_seed(0)
    model = _Swin(32 if quick else 64, (1, 1, 2) if quick else (1, 1, 6, 1))
    return Subject(model, (torch.randn(2, 3, 64, 64),), functional.cross_entropy, torch.arange(2))


MODELS: dict[str, Callable[[bool], Subject]] = {
    "GPT": _gpt,
    "Llama": _llama,
    "ViT": _vit,
    "T5": _t5,
    "ResNet": lambda quick: _convolutions(quick, 2),
    "deep ResNet": lambda quick: _convolutions(quick, 3),
    "MLP": lambda quick: _mlp(64, 16, 4) if quick else _mlp(1024, 128, 12),
    "wide MLP": lambda quick: _mlp(64, 16, 4) if quick else _mlp(512, 1024, 12),
}
"""By name; each takes whether it is to be tiny."""

UNEVEN: dict[str, Callable[[bool], Subject]] = {
    **{name: MODELS[name] for name in ("GPT", "Llama", "T5")},
    "U-Net": _u_net,
    "Swin": _swin,
}
"""Those whose ends differ from their middle, or whose layers differ."""
