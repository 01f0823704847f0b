"""A model that computes something else in training than in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """Draws what it decodes in training, and goes through its layers in another order in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mean, self.spread = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.encoder(x).relu()
        if not self.training:
            spread, mean = self.spread(x), self.mean(x)
            return self.decoder(mean).tanh(), mean, spread
        mean, spread = self.mean(x), self.spread(x)
        noise = torch.randn_like(mean).mul(2).div(2) * (0.5 * spread).exp()
        return self.decoder(mean + noise).tanh(), mean, spread
