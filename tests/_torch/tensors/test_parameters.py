"""Parameters with other memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from partita._torch.tensors.parameters import has_hooks, joint_hooks, parameter_like
from partita.errors import NotSupported


class _Scaled(nn.Parameter):
    scale = 1


def _gradient(parameter: nn.Parameter) -> list[float]:
    parameter.grad = None
    parameter.sum().backward()
    assert isinstance(parameter.grad, Tensor)
    return parameter.grad.tolist()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_seen(register: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not has_hooks(weight)
    handle = getattr(weight, register)(lambda _: None)
    assert has_hooks(weight)
    handle.remove()
    assert not has_hooks(weight)


@pytest.mark.parametrize("kind", [nn.Parameter, _Scaled])
def test_class_and_attributes_are_those_of_the_parameter(kind: Any) -> None:
    weight = kind(torch.ones(2), requires_grad=False)
    weight._no_weight_decay = True
    other: Any = parameter_like(weight, torch.zeros(2))
    assert type(other) is kind
    assert other._no_weight_decay
    assert other.tolist() == [0, 0]
    assert not other.requires_grad
    assert other.device == torch.device("cpu")
    assert parameter_like(weight, torch.zeros(2, device="meta")).device.type == "meta"


def test_a_gradient_that_is_there_is_copied() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    other = parameter_like(weight, torch.zeros(2))
    weight.grad = None
    other.sum().backward()
    assert isinstance(other.grad, Tensor)
    assert other.grad.tolist() == [2, 2]


def test_hooks_go_along_for_as_long_as_they_are_registered() -> None:
    seen: list[Tensor] = []
    weight = nn.Parameter(torch.ones(2))
    doubled = weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(seen.append)
    other = parameter_like(weight, torch.zeros(2))
    assert _gradient(other) == [2, 2]
    assert seen == [other]
    doubled.remove()
    assert _gradient(other) == [1, 1]
    weight.register_hook(lambda gradient: 5 * gradient)  # later: of that parameter alone
    assert _gradient(other) == [1, 1]
    assert _gradient(weight) == [5, 5]


def test_hooks_are_removed_by_their_handle_where_the_first_parameter_is_gone() -> None:
    weight = nn.Parameter(torch.ones(2))
    handle = weight.register_hook(lambda gradient: 2 * gradient)
    other = parameter_like(weight, torch.zeros(2))
    del weight
    gc.collect()
    assert _gradient(other) == [2, 2]
    handle.remove()
    assert _gradient(other) == [1, 1]


def test_hooks_of_a_frozen_parameter_wait() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.requires_grad_(False)
    other = parameter_like(weight, torch.zeros(2))
    assert has_hooks(other)
    assert not other.requires_grad
    assert _gradient(other.requires_grad_()) == [2, 2]


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_that_wait_for_several_tensors_are_seen_and_not_copied(mode: Any) -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    register_multi_grad_hook((first, second), lambda _: None, mode=mode)
    register_multi_grad_hook((third,), lambda _: None, mode=mode)
    third.register_hook(lambda _: None)
    assert list(joint_hooks(first)) == list(joint_hooks(second))
    assert len(list(joint_hooks(third))) == 1
    assert list(joint_hooks(third)) != list(joint_hooks(first))
    with pytest.raises(NotSupported, match=r"shape \[2\] has a hook of register_multi_grad_hook"):
        parameter_like(first, torch.zeros(2))
