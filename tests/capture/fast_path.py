"""A model that takes torch's fast path for attention where no gradients are recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0], [3, 2, 1, 4]])


class Encoder(nn.Module):
    """Takes torch's fast path for attention where no gradients are recorded."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)
        self.masked = masked

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens == 0 if self.masked else None
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=mask).mean(1))


class Preference(nn.Module):
    """A trained layer beside a frozen one that runs without gradients, as preferences are learned (DPO)."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = (
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(8, 1)
        self.train()

    def train(self, mode: bool = True) -> Preference:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            reference = self.frozen(x)
        return self.head(self.trained(x) - reference)
