"""The demo's model: a small decoder-only transformer over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.demo.settings import TransformerConfig

__all__ = ["ByteTransformer"]


class ByteTransformer(nn.Module):
    """A transformer that predicts the next byte.

    Pre-norm blocks with dropout; rotary position embedding (Su et al. 2021, "RoFormer"); the input embedding
    is also the output projection (Press and Wolf 2017, "Using the Output Embedding to Improve Language
    Models").
    """

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        config = config or TransformerConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        cosine, sine = _rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary) for int64 tokens of shape (batch, length)."""
        hidden = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            hidden = block(hidden, self.cosine, self.sine)
        return self.head(self.norm(hidden))


class _Block(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosine, sine)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project_in = nn.Linear(config.width, 3 * config.width)
        self.project_out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.project_in(hidden).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.project_out(mixed.transpose(1, 2).reshape(batch, length, width)))


def _rotary_tables(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (context, size)."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def _rotate(value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    length = value.shape[-2]
    left, right = value.chunk(2, dim=-1)
    return value * cosine[:length] + torch.cat((-right, left), dim=-1) * sine[:length]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
