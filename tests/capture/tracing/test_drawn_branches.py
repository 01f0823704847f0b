"""A model that draws with torch to decide which layers run is not frozen in the way that most runs take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import CaptureError
from partita.pipelining import SplitPoint, pipeline


class Skips(nn.Module):
    """Layerdrop as speech and translation models have it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            x = layer(x)
        return x


class Draws(nn.Module):
    """Decides by a draw that ``skip`` makes, which is true in few runs, or in none."""

    def __init__(self, skip: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if self.training and self.skip() else layer(x)
        return x


class Stops(nn.Linear):
    """Asks for what it computes from random numbers and from its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + torch.rand(x.shape))
        return y.clamp(-1, 1) if y.isinf().any() else y


X = torch.randn(2, 4)


@pytest.mark.parametrize("rate", [0.001, 0.6])
def test_layers_that_are_left_out_at_random_are_refused_with_the_line(rate: float) -> None:
    """At a small rate the graph was proven, and failed in the first step that drew a layer out; only the
    first layer's draw was looked at, so that others ran where the model leaves them out.
    """
    with pytest.raises(CaptureError, match="draws a random number to decide what it runs") as caught:
        capture(Skips(rate), (X,))
    assert "(at if self.training and torch.rand([]) < self.rate:" in str(caught.value)


@pytest.mark.parametrize(
    "skip",
    [
        lambda: torch.zeros(()).uniform_(0.0, 1.0) < 0.001,
        lambda: torch.empty(()).uniform_(-1, 1) > 0.99,
        lambda: torch.empty(1).bernoulli_(0.001),
        lambda: torch.bernoulli(torch.full((1,), 0.001)),
        lambda: torch.bernoulli(torch.empty(1), 0.001),
        lambda: torch.rand_like(torch.empty(())) < 0.001,
        lambda: torch.randn(()) > 3.5,
        lambda: torch.randn_like(torch.empty(())) < -3.5,
        lambda: torch.empty(()).normal_(1.0, 2.0) > 8,
        lambda: torch.randint(1000, (1,)) > 998,
        lambda: torch.randint(1, 1000, (1,)) < 2,
    ],
)
def test_any_draw_of_torch_that_decides_is_refused(skip: Callable[[], Tensor]) -> None:
    """Only `torch.rand` was looked at: with another draw the graph was proven, held one way, and failed in
    whichever step drew the other way.
    """
    with pytest.raises(CaptureError, match="draws a random number to decide what it runs"):
        capture(Draws(skip), (X,))


@pytest.mark.parametrize(
    "skip",
    [
        lambda: torch.zeros(()).uniform_(0.0, 1.0) < 0,
        lambda: torch.empty(1).bernoulli_(0.0),
        lambda: torch.bernoulli(torch.ones(1)) < 1,
        lambda: torch.randint(2, (1,)) > 1,
    ],
)
def test_draws_that_can_answer_in_one_way_only_are_captured(skip: Callable[[], Tensor]) -> None:
    assert capture(Draws(skip), (X,), prove=True).proof.holds


def test_what_the_refusal_advises_can_be_done() -> None:
    assert capture(Skips(0.0), (X,), prove=True).proof.holds
    assert capture(Skips(0.5), (X,), modes="eval", prove=True).proof.holds
    model = Skips(0.5)
    pipe = pipeline(model, (X,), split_spec={"layers.1": SplitPoint.BEGINNING}, frontend="modules")
    for seed in range(4):
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        assert torch.equal(pipe(X), expected)


def test_a_question_about_inputs_and_random_numbers_is_none_of_these() -> None:
    assert capture(Stops(4, 4), (X,), prove=True).proof.holds
