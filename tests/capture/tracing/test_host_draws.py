"""A model that draws random numbers outside of torch is not frozen at the draw of its capture."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import CaptureError


class Skips(nn.Module):
    """Layerdrop: a layer runs or not, and Python says which."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def draw(self) -> float:
        return random.random()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or self.draw() > 0.5:
                x = layer(x)
        return x


class SkipsByNumpy(Skips):
    def draw(self) -> float:
        return float(np.random.uniform(0, 1))


class SkipsByItself(Skips):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(0)

    def draw(self) -> float:
        return self.dice.random()


class SkipsByItsNumpy(Skips):
    def __init__(self) -> None:
        super().__init__()
        self.dice = np.random.default_rng(0)

    def draw(self) -> float:
        return float(self.dice.random())


class Seeds(Skips):
    """The same numbers in every run."""

    def forward(self, x: Tensor) -> Tensor:
        random.seed(3)
        return super().forward(x)


X = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("kind", "name", "line"),
    [
        (Skips, "Python's random", "random.random()"),
        (SkipsByNumpy, "numpy.random", "np.random.uniform(0, 1)"),
        (SkipsByItself, "the generator dice", "self.dice.random()"),
        (SkipsByItsNumpy, "the generator dice", "self.dice.random()"),
    ],
)
def test_a_draw_outside_of_torch_is_refused_with_its_line(kind: type[Skips], name: str, line: str) -> None:
    with pytest.raises(CaptureError, match="would repeat the draw of its capture") as caught:
        capture(kind(), (X,))
    assert f"draws from {name} in its forward (at return " in str(caught.value)
    assert line in str(caught.value)
    assert "test_host_draws.py" in str(caught.value)


def test_the_mode_without_draws_can_be_captured_and_the_other_says_why_not() -> None:
    model = Skips().eval()
    captured = capture(model, (X,))
    assert torch.equal(captured.module(X), model(X))
    assert "draws from Python's random" in captured.reason
    with pytest.raises(CaptureError, match="draws from Python's random"):
        captured.module.train()(X)


def test_numbers_that_the_model_seeds_itself_are_those_of_every_run() -> None:
    model = Seeds()
    captured = capture(model, (X,), modes="train")
    assert torch.equal(captured.module(X), model(X))


@pytest.mark.parametrize("kind", [Skips, SkipsByNumpy, SkipsByItself, Seeds])
def test_generators_stand_where_they_stood_before_a_capture(kind: type[Skips]) -> None:
    model = kind().eval()
    states = random.getstate(), pickle.dumps(np.random.get_state())
    inner = model.dice.getstate() if isinstance(model, SkipsByItself) else None
    capture(model, (X,))
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == states
    assert inner is None or model.dice.getstate() == inner  # type: ignore[union-attr]
