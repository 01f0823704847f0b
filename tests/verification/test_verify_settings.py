"""Process-wide settings, and the caller's own modules, arguments and generators, which stay as they are."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verification.nets import X, assert_only, make_net, raising
from torch import nn

from partita.verification import verify


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        (lambda: torch.set_grad_enabled(False), "grad mode"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu"),
        (lambda: torch.set_autocast_dtype("cpu", torch.float16), "autocast dtype on cpu"),
        (lambda: torch.set_autocast_cache_enabled(False), "autocast cache"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms (enabled, warn only)"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
    ],
)
def test_a_setting_that_is_left_changed_is_reported_and_put_back(leak: Callable[[], None], name: str) -> None:
    def leaky(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        leak()
        return y

    result = verify(leaky, lambda x: x * 2, (X,))
    assert_only(result, "global state", f"{name} after forward")
    assert verify(leaky, leaky, (X,)).ok
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_inference_mode_that_is_left_on_is_reported_and_put_back() -> None:
    open_modes = []

    class Leaky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            open_modes.append(torch.inference_mode())
            open_modes[-1].__enter__()
            return y

    result = verify(Leaky(), lambda x: x * 2, (X,))
    assert "inference mode after forward" in {d.where for d in result.differences}
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_both_run_under_the_callers_modes(mode: Callable[[], Any]) -> None:
    net = nn.Linear(4, 2)
    seen = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), net(x).dtype))
            return x * 2

    with mode():
        expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), net(X).dtype)
        assert verify(net, net, (X,)).ok
        assert verify(Looking(), lambda x: x * 2, (X,)).ok
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), net(X).dtype) == expected
    assert seen == [expected]


def test_nothing_of_the_callers_changes() -> None:
    net = make_net()
    net.drop.eval()
    net(X)["total"].backward()
    x = X.clone().requires_grad_()
    x.grad = torch.full_like(x, 7.0)
    state = copy.deepcopy(net.state_dict())
    gradients = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}  # type: ignore[union-attr]
    objects = {name: id(parameter) for name, parameter in net.named_parameters()}
    versions = {name: tensor._version for name, tensor in net.state_dict(keep_vars=True).items()}
    generator, python = torch.get_rng_state(), random.getstate()

    verify(lambda a: net(a), net, (x,)).check()
    verify(raising(ValueError("no")), net, (x,))

    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == objects
    assert all(torch.equal(p.grad, gradients[name]) for name, p in net.named_parameters())  # type: ignore[arg-type]
    assert {name: t._version for name, t in net.state_dict(keep_vars=True).items()} == versions
    assert torch.equal(x, X)
    assert torch.equal(x.grad, torch.full_like(x, 7.0))
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert (net.training, net.norm.training, net.drop.training) == (True, True, False)
