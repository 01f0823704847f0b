from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.capture import capture
from partita.pipelining import SplitPoint, pipeline


class Picky(nn.Module):
    """Fails in the middle of its forward where it is given lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if lengths is not None:
            raise TypeError("lengths are for others")
        return self.norm(x)  # type: ignore[no-any-return]


class Tries(nn.Module):
    """Gives each layer the lengths, and those that don't take them only the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Picky(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x, lengths=x)
            except TypeError:
                x = layer(x)
        return x


def test_a_call_that_fails_and_is_made_otherwise_is_captured() -> None:
    """Torch took the failed call for one that is under way, and lost count; the model was refused."""
    torch.manual_seed(0)
    model, x = Tries(), torch.randn(2, 4)
    for place in ("layers.1", "layers.2", "layers.1.norm"):
        pipe = pipeline(model, (x,), split_spec={place: SplitPoint.BEGINNING})
        assert pipe.num_stages == 2
        partita.verify(pipe, model, (x,)).check()


class Narrow(nn.Module):
    """Multiplies with what does not fit, by a layer or at once, and does without."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.linear, self.at_once = nn.Linear(4, 4), at_once

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        try:
            return torch.mm(x[:, :3], self.linear.weight) if self.at_once else self.linear(x[:, :3])
        except RuntimeError:
            return x.cos()


@pytest.mark.parametrize("at_once", [False, True])
def test_an_operator_that_failed_is_not_in_the_graph(*, at_once: bool) -> None:
    """The captured graph failed where the model goes on."""
    model, x = Narrow(at_once=at_once), torch.randn(2, 4)
    for graph in capture(model, (x,), prove=False).graphs().values():
        assert torch.equal(graph(x), model(x))
