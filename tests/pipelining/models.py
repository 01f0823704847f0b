"""Small models, one for each thing that a cut can get wrong, and where to cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import SplitPoint

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """A model and how to run it.

    Attributes:
        name: what it is about.
        make: the model.
        batch: positional and keyword arguments, and the target, for so many samples.
        loss: from (output, target).
        after: modules after which the cuts lie, in order; ``stages`` of them give ``stages`` cuts less one.
    """

    name: str
    make: Callable[[], nn.Module]
    after: tuple[str, ...] = ("a", "b", "c")
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Tensor]] = field(
        default=lambda n: ((torch.randn(n, WIDTH),), {}, torch.randn(n, WIDTH))
    )
    loss: Callable[[Any, Tensor], Tensor] = functional.mse_loss

    def split_spec(self, stages: int) -> dict[str, SplitPoint]:
        return dict.fromkeys(self.after[: stages - 1], SplitPoint.END)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def data(self, samples: int, seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        torch.manual_seed(seed)
        return self.batch(samples)


class _Four(nn.Module):
    """Four layers, for subclasses to use as they like."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, layers.get(name, nn.Linear(WIDTH, WIDTH)))


class Plain(_Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).relu()).tanh())


class InPlace(_Four):
    """Stages 1 and 2 start by writing to what they are given."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(functional.relu(self.a(x), inplace=True))
        h.mul_(2.0)
        return self.d(functional.relu(self.c(h), inplace=True))


class Skip(_Four):
    """One value is used by two later stages, with another use in between."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        early = self.b(h) * h
        middle = self.c(early) + h * 0.5
        return self.d(middle) + h.tanh() + early


class Mask(_Four):
    """A model input that only later stages use; by keyword, of batch 1, with a default and a number beside
    it.
    """

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        h = self.b(self.a(x))
        h = self.c(h).masked_fill(mask, 0.0) * scale
        return self.d(h) if bias is None else self.d(h) + bias


class Outputs(_Four):
    """A dict of tuples, None, numbers, a value of the first stage, and the input itself."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = self.a(x)
        h = self.c(self.b(early))
        return {"out": (self.d(h), None), "early": early, "given": x, "n": 3, "rows": [h.argmax(1)]}


def outputs_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return functional.mse_loss(output["out"][0], target) + output["early"].square().mean() * 0.1


class Frozen(_Four):
    """The first two stages train nothing, and the third has a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.a, self.b):
            layer.requires_grad_(False)
        self.c.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).relu()).relu())


class Ints(_Four):
    """Integers and booleans cross borders."""

    def __init__(self) -> None:
        super().__init__(a=nn.Embedding(16, WIDTH))
        self.second = nn.Embedding(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.a(tokens)
        best, large = h.argmax(-1), h > 0
        h = self.b(h)
        h = self.c(h) + self.second(best)
        return self.d(torch.where(large, h, -h)).mean(1)


class Strided(_Four):
    """What crosses is transposed, chunked, or a broadcast view."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).view(-1, 2, WIDTH // 2).transpose(1, 2)
        left, right = self.b(h.transpose(1, 2).reshape(-1, WIDTH)).chunk(2, dim=1)
        wide = left[:, :, None].expand(-1, -1, 2)
        h = self.c(wide.reshape(-1, WIDTH)) + h.flatten(1)
        return self.d(torch.cat((right, right), 1) + h)


class Regions(_Four):
    """Autocast and no_grad inside, one in the other, and half precision crosses a border."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(self.a(x))
            with torch.no_grad():
                scale = self.c(h).abs().amax(1, keepdim=True)
        h = self.c(h.float() / (1 + scale.float()))
        with torch.no_grad():
            shift = h.mean()
        return self.d(h - shift)


class Normed(_Four):
    """Batch norm: running statistics, a counter, another graph in evaluation."""

    def __init__(self) -> None:
        super().__init__(a=nn.BatchNorm1d(WIDTH), c=nn.BatchNorm1d(WIDTH, momentum=0.3))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        self.register_buffer("kept", torch.zeros(3))
        self.drop = nn.Dropout(0.3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.drop(self.b(self.a(x))) * self.scale))


class NoParameters(_Four):
    """Two stages have no parameters at all, and one of them is given nothing but what it passes on."""

    def __init__(self) -> None:
        super().__init__(b=nn.Dropout(0.5), c=nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class Constants(_Four):
    """A stage whose output depends on parameters alone, and tensors made in forward."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.b.weight.sum(0).sigmoid()
        h = self.c(self.a(x)) + torch.tensor([1.0, 2.0] * (WIDTH // 2))
        return self.d(h) * gate + torch.arange(WIDTH)


class Called(_Four):
    """One module runs in two stages."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.a(self.c(self.b(self.a(x)))))


class Reused(_Four):
    """A stage hands out a buffer of its own that each microbatch overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        with torch.no_grad():
            self.seen.copy_(h)
            seen = self.seen.view(2, WIDTH)
        return self.d(self.c(self.b(h + seen.sum()))), seen


class Counting(_Four):
    """A later stage reads what the first one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.d(self.c(self.b(self.a(x)))) + self.calls


class Noisy(nn.Module):
    """A decoder-only transformer with tied embedding, dropout, and dropout inside attention."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("position", torch.randn(6, WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = functional.dropout(self.embedding(tokens), 0.1, self.training) + self.position
        for block in self.blocks:
            h = block(h, self.position)
        return self.head(self.norm(h))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(h) + position)[:, None].chunk(3, -1)
        p = 0.25 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return h + self.feed(h + mixed[:, 0])


def _tokens(samples: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    return (torch.randint(16, (samples, 6)),), {}, torch.randint(16, (samples, 6))


def _ints(samples: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    return (torch.randint(16, (samples, 6)),), {}, torch.randn(samples, WIDTH)


def _masked(samples: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    mask = torch.arange(WIDTH)[None] % 3 == 0
    return (torch.randn(samples, WIDTH), 2.5), {"mask": mask}, torch.randn(samples, WIDTH)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def first_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target)


TRANSFORMER = Case("transformer", Noisy, ("embedding", "blocks.0", "blocks.1"), _tokens, _cross_entropy)
PLAIN = Case("plain", Plain)
MASK = Case("mask", Mask, batch=_masked)
NORMED = Case("batch norm", Normed)
SKIP = Case("skip", Skip)
IN_PLACE = Case("in place", InPlace)
OUTPUTS = Case("outputs", Outputs, loss=outputs_loss)
REUSED = Case("reused buffer", Reused, ("b", "c"), loss=first_loss)
REGIONS = Case("regions", Regions, ("a", "b"))
CALLED = Case("called twice", Called, ("b", "c"))
CASES = (
    TRANSFORMER,
    PLAIN,
    IN_PLACE,
    SKIP,
    MASK,
    OUTPUTS,
    Case("frozen", Frozen),
    Case("ints", Ints, batch=_ints),
    Case("strided", Strided, ("a", "b", "c")),
    REGIONS,
    NORMED,
    Case("no parameters", NoParameters),
    Case("constants", Constants, ("c",)),
    Case("counting", Counting),
    CALLED,
    REUSED,
)
