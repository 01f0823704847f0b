"""Ordinary models, captured by each tracer, hold nothing that is unknown."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from partita.graph.effects import analyse


class Residual(nn.Module):
    """Convolutions, batch norm and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.act, self.pool = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.first(x)))
        y = self.second(x)
        y += x
        return self.head(torch.flatten(self.pool(self.act(y)), 1))


class Recurrent(nn.Module):
    """An LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 4, 2, batch_first=True, dropout=0.1), nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, _c) = self.lstm(x)
        return self.gru(y)[0][:, -1] + h[0].mean()


class Encoder(nn.Module):
    """torch's own transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Block(nn.Module):
    """Rotary attention as in the usual language models."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        q, k, v = (
            part.view(batch, length, 2, 4).transpose(1, 2) for part in self.qkv(h.to(x.dtype)).chunk(3, -1)
        )
        q, k = ((t * cos) + (torch.cat((-t[..., 2:], t[..., :2]), -1) * sin) for t in (q, k))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(a.transpose(1, 2).reshape(batch, length, width)))


class Rotary(nn.Module):
    """A language model with tied weights, a region without grad, one without autocast, and recomputation."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4), persistent=False)
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angles = torch.arange(ids.shape[1])[:, None].float() @ self.frequencies[None].float()
            angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute else block(x, cos, sin)
        logits = self.head(x)
        return {
            "logits": logits,
            "loss": functional.cross_entropy(logits[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1)),
        }


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "residual": (Residual, torch.ones(2, 3, 4, 4)),
    "recurrent": (Recurrent, torch.ones(2, 3, 4)),
    "encoder": (Encoder, torch.ones(2, 3, 8)),
    "rotary": (lambda: Rotary(recompute=False), torch.ones(2, 5, dtype=torch.long)),
    "recomputed": (lambda: Rotary(recompute=True), torch.ones(2, 5, dtype=torch.long)),
}


def _dynamo(model: nn.Module, x: torch.Tensor) -> list[GraphModule]:
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    torch._dynamo.reset()
    return graphs


def _export(model: nn.Module, x: torch.Tensor) -> list[GraphModule]:
    program = torch.export.export(model, (x,))
    return [program.module(), copy.copy(program).run_decompositions().graph_module]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch.export's own making
@pytest.mark.parametrize(
    ("capture", "name"),
    # dynamo leaves recurrent modules to the interpreter
    [(_export, name) for name in MODELS] + [(_dynamo, name) for name in MODELS if name != "recurrent"],
)
def test_nothing_in_an_ordinary_model_is_unknown(
    name: str, capture: Callable[..., list[GraphModule]]
) -> None:
    make, x = MODELS[name]
    graphs = capture(make(), x)
    assert graphs
    for outer in graphs:
        for gm in outer.modules():
            if isinstance(gm, GraphModule):
                effects = analyse(gm)
                unknown = [
                    (effects.nodes[i].name, effect.why)
                    for i, effect in effects.by_position.items()
                    if effect.unknown or effect.barrier
                ]
                assert not unknown


def test_a_symbolic_trace_calls_known_modules() -> None:
    effects = analyse(torch.fx.symbolic_trace(Residual()))
    assert not [effect.why for effect in effects.by_position.values() if effect.unknown]
    assert {"norm", "act", "act_1"} <= {effects.nodes[i].name for i in effects.writers}
