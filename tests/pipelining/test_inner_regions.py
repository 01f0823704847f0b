"""Autocast, no_grad and inference regions inside a model, also where a cut goes through them; torch's own
result beside ours.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH, Case
from tests.pipelining.running import assert_equal, assert_same, cut, piped, uncut
from torch import Tensor, nn
from torch.distributed import pipelining as theirs

from partita.pipelining import SplitPoint, pipeline

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class _Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))


class Autocast(_Four):
    """A cut lies in the region."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.c(self.b(self.a(x)))
        return self.d(h.float())


class NoGrad(_Four):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            fixed = self.c(self.b(h))
        return self.d(h + fixed)


class NoGradView(_Four):
    """The view requires a gradient, as what it is of does, and nothing gets it. Where it crossed, no backward
    pass could start from it.
    """

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            view = h[:, :]
        return self.d(self.c(self.b(h).tanh()) + view)


class Nested(_Four):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(h)
            with torch.no_grad():
                scale = self.c(h).amax()
                with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                    kept = self.d(h.float())
        return self.d(h.float() * scale.float() + kept)


class Inference(_Four):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.inference_mode():
            fixed = self.c(self.b(h))
        return self.d(h) + fixed.clone()


@torch.no_grad()
def _frozen(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


class Decorated(_Four):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(h + _frozen(self.c, h))


FAILS = [Autocast, NoGrad, Nested, Decorated]
EACH = pytest.mark.parametrize("kind", [*FAILS, Inference, NoGradView])


@EACH
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_outputs_and_gradients_are_the_models(kind: type[nn.Module], mode: bool) -> None:
    case = Case(kind.__name__, kind)
    model, pipe = case.model().train(mode), cut(case, 4).train(mode)
    for samples in (2, 5):
        args, _, target = case.data(samples)
        for runner in (model, pipe):
            case.loss(runner(*args), target).backward()
        assert_equal(pipe(*args), model(*args))
    parameters = [
        dict(pipe.get_stage_module(index).named_parameters(remove_duplicate=False)) for index in range(4)
    ]
    gradients = {name: value.grad for part in parameters for name, value in part.items()}
    expected = dict(model.named_parameters())
    assert_equal(gradients, {name: expected[name].grad for name in gradients})


@EACH
def test_ranks_are_the_uncut_model_bit_for_bit(kind: type[nn.Module]) -> None:
    case = Case(kind.__name__, kind)
    assert_same(piped(cut(case, 3), case), uncut(case))


def _cut_by_torch(model: nn.Module, x: Tensor) -> Any:
    spec = {"b": theirs.SplitPoint.END}
    return theirs.pipeline(copy.deepcopy(model), (x,), split_spec=spec)


@pytest.mark.parametrize("kind", FAILS)
def test_torch_can_not_cut_a_model_with_such_a_region(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(2, WIDTH)
    with pytest.raises((AssertionError, RuntimeError)):  # the former with torch 2.11
        _cut_by_torch(model, x)
    assert torch.equal(pipeline(model, (x,), split_spec={"b": SplitPoint.END})(x), model(x))


def test_torch_loses_an_inference_region_and_trains_what_the_model_does_not() -> None:
    model, x = Inference(), torch.randn(2, WIDTH)
    model(x).sum().backward()
    assert model.c.weight.grad is None
    output = _cut_by_torch(model, x)
    stage = output.get_stage_module(1)
    output(x)[0].sum().backward()
    assert stage.c.weight.grad is not None
    model.zero_grad()
    pipeline(model, (x,), split_spec={"b": SplitPoint.END})(x).sum().backward()
    assert model.c.weight.grad is None
    assert model.d.weight.grad is not None
