"""What an optimizer does to a parameter is tried with and without others beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from partita.pipelining.steps.preparing.optimizer_trial import looks_at_others


class Clips(AdamW):
    """By the norm of all gradients, as many people's own do."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class ClipsEach(AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                clip_grad_norm_(parameter, 1.0)
        return super().step(closure)


class Mean(Optimizer):
    """Keeps its parameters and what it knows of them in attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.own = [parameter for group in self.param_groups for parameter in group["params"]]
        self.sizes = {id(parameter): 0.0 for parameter in self.own}

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        mean = sum(p.grad.abs().mean() for p in self.own if p.grad is not None) / len(self.own)
        for parameter in self.own:
            if parameter.grad is not None:
                parameter -= parameter.grad / mean


class ByGroup(SGD):
    """One rate for a whole group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / max(p.grad.abs().max() for p in group["params"])
        return super().step(closure)


class StableDecay(AdamW):
    """Divides its weight decay, which is small, by what all gradients are, as AdamS does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            size = sum(p.grad.square().mean() for p in group["params"])
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter *= 1 - group["lr"] * group["weight_decay"] / (1 + size)
        return super().step(closure)


class ByName(SGD):
    """Has a list beside that of the parameters."""

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=False):
                parameter -= parameter.grad * group["lr"] * (2 if "bias" in name else 1)


class Noise(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


class HostNoise(SGD):
    def step(self, closure: Any = None) -> Any:
        rate = random.random()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= rate
        return super().step(closure)


class NeedsClosure(Clips):
    def step(self, closure: Any) -> Any:
        closure()
        return super().step()


class Ascends(SGD):
    """Computes gradients a second time, where they rise by a step of one length for all parameters (SAM)."""

    @torch.no_grad()
    def first_step(self) -> None:
        self.ascent = [(p, p.grad.clone()) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([gradient.norm() for _, gradient in self.ascent]).norm()
        self.ascent = [(p, gradient.mul_(0.5 / norm)) for p, gradient in self.ascent]
        for parameter, rise in self.ascent:
            parameter += rise

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, rise in self.ascent:
            parameter -= rise
        SGD.step(self)


class AscendsByItself(SGD):
    def step(self, closure: Any = None) -> Any:
        Ascends.first_step(self)  # type: ignore[arg-type]
        closure()
        Ascends.second_step(self)  # type: ignore[arg-type]


class OverRanks(Clips):
    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.zeros(1))  # there is no process group: it would be an error
        return super().step(closure)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 7), nn.Conv2d(2, 3, 3), nn.LayerNorm(5))


def _looks(new_optimizer: Callable[[Any], Optimizer]) -> bool:
    """Of an optimizer that has a step behind it, hooks, and a scheduler."""
    model = _model()
    optimizer = new_optimizer(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.register_step_post_hook(_not_to_be_called)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # warm-up from zero
    before = [(p.detach().clone(), p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    states, host = torch.get_rng_state(), random.getstate()
    options = [{**group, "params": None} for group in optimizer.param_groups]
    result = looks_at_others(optimizer)
    for parameter, (value, gradient, content) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, content)
        assert torch.equal(parameter, value)
    assert torch.equal(torch.get_rng_state(), states)
    assert random.getstate() == host
    assert not optimizer.state
    assert options == [{**group, "params": None} for group in optimizer.param_groups]
    return result


def _not_to_be_called(*_: object) -> None:
    raise AssertionError


class ByLoss(SGD):
    """A step in proportion to the loss (ALI-G)."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        loss = closure()
        own = [p for group in self.param_groups for p in group["params"]]
        rate = loss / torch.stack([p.grad.norm() for p in own]).norm() ** 2
        for parameter in own:
            parameter -= rate * parameter.grad
        return loss


LOOK_AT_OTHERS = [Clips, ByGroup, Mean, StableDecay, NeedsClosure, Ascends, AscendsByItself, ByLoss]


@pytest.mark.parametrize("kind", LOOK_AT_OTHERS)
def test_a_number_of_all_parameters_shows(kind: Any) -> None:
    """Their steps on the ranks of a pipeline were others than the uncut model's, without a word."""
    assert _looks(kind)


def test_with_one_parameter_too() -> None:
    assert looks_at_others(Clips([nn.Parameter(torch.zeros(1000, 2, dtype=torch.bfloat16))]))


@pytest.mark.parametrize(
    "new_optimizer",
    [
        ClipsEach,
        HostNoise,
        SGD,
        lambda own: Adam(own, amsgrad=True, foreach=True),
        lambda own: AdamW(own, fused=True),
        lambda own: AdamW(own, torch.tensor(0.1), capturable=False, foreach=False),
    ],
    ids=["ClipsEach", "HostNoise", "SGD", "Adam", "fused", "tensor"],
)
def test_none_shows_where_each_parameter_is_looked_at_alone(
    new_optimizer: Callable[[Any], Optimizer],
) -> None:
    assert not _looks(new_optimizer)


@pytest.mark.parametrize("kind", [Noise, OverRanks])
def test_what_can_not_be_tried_is_not_refused(kind: Any) -> None:
    assert not _looks(kind)


def test_rules_by_name_are_those_of_each_parameter_alone() -> None:
    assert not looks_at_others(ByName(_model().named_parameters()))


def test_a_step_that_reaches_for_the_users_own_gradients_finds_none() -> None:
    model = _model()

    class Other(SGD):
        def step(self, closure: Any = None) -> Any:
            clip_grad_norm_(model.parameters(), 0.1)
            return super().step(closure)

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    looks_at_others(Other(model.parameters()))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
