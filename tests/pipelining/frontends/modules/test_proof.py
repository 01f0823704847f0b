"""The proof sees what a pipe returns: the values, and of which class they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from partita.errors import CaptureError
from partita.pipelining.frontends.modules.pipe import ModulePipe
from partita.pipelining.frontends.modules.proof import check_against_model


class Deferred:
    """An object that is its own leaf, and that compares with nothing else as equal."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self) -> Tensor:
        return self.value


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), x.sum()


class Changed(nn.Module):
    """Stands for a pipe that returns something else than the model."""

    def __init__(self, model: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.model(x))


CHANGES = {
    "a list": (list, "the class of what it returns"),
    "one value less": (lambda pair: pair[:1], "how many values it returns"),
    "another value": (lambda pair: (pair[0] + 1e-3, pair[1]), "output 0"),
    "another dtype": (lambda pair: (pair[0], pair[1].double()), "output 1"),
    "an object that is called": (lambda pair: (pair[0], Deferred(pair[1])), "output 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_result_is_refused(name: str) -> None:
    model = Model()
    change, what = CHANGES[name]
    pipe = cast(ModulePipe, Changed(model, change))
    with pytest.raises(CaptureError, match=f"what it does whole: {what} differs in call 1"):
        check_against_model(pipe, model, (torch.ones(2, 3),), {}, training=True)


def test_the_same_result_is_proven() -> None:
    model = Model()
    pipe = cast(ModulePipe, Changed(model, lambda pair: pair))
    check_against_model(pipe, model, (torch.ones(2, 3),), {}, training=False)
