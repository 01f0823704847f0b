"""Calls of modules, seen from outside."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita._torch.modules.calls import (
    calls_watched,
    inside_of_checkpoint,
    inside_of_function,
    inside_of_transform,
    overridden_calls,
    watch_calls,
)

SEEN: list[tuple[str, bool]] = []


def _enter(path: str, _: Any) -> None:
    SEEN.append((f"> {path}", inside_of_checkpoint()))


def _leave(path: str) -> None:
    SEEN.append((f"< {path}", inside_of_checkpoint()))


class Checkpointed(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)


def _watched() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), Checkpointed(2, 2))
    for path, module in model.named_modules():
        watch_calls(module, path, _enter, _leave)
    SEEN.clear()
    return model


def test_calls_are_seen_in_order_and_copies_are_watched_too() -> None:
    model = copy.deepcopy(_watched())
    model(torch.ones(1, 2))
    assert [name for name, _ in SEEN] == ["> ", "> 0", "< 0", "> 1", "< 1", "< "]
    assert [name for name, inside in SEEN if inside] == ["> 1", "< 1"]


def test_a_class_that_checkpoints_its_own_calls_is_seen_around_them() -> None:
    model = _watched()
    own = vars(Checkpointed)["__call__"]
    assert overridden_calls(model) == [Checkpointed]
    with calls_watched([Checkpointed]):
        model(torch.ones(1, 2))
    assert [name for name, _ in SEEN] == ["> ", "> 0", "< 0", "> 1", "< 1", "< "]
    assert not any(inside for _, inside in SEEN)
    assert vars(Checkpointed)["__call__"] is own


def test_what_enter_returns_goes_around_the_call() -> None:
    model = nn.Linear(2, 2)
    watch_calls(model, "", lambda _path, _arguments: lambda call: (call(), "around"), lambda _path: None)
    x = torch.ones(1, 2)
    output, word = model(x)
    assert word == "around"
    assert torch.equal(output, nn.functional.linear(x, model.weight, model.bias))


def test_a_call_need_not_be_made() -> None:
    model = nn.Linear(2, 2)
    watch_calls(model, "", lambda _path, _arguments: lambda _call: "instead", lambda _path: None)
    assert model(torch.ones(1, 2)) == "instead"


def test_transforms_of_torch_func_are_seen_from_within() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(inside_of_transform())
        return x * 2

    look(torch.ones(2))
    for transform in (torch.func.vmap, torch.func.jacrev, torch.func.jacfwd):
        transform(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [False, True, True, True, False]


def test_what_runs_within_a_function_is_seen() -> None:
    seen: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(inside_of_function())
            return x * 2

        @staticmethod
        def backward(_ctx: Any, *grads: torch.Tensor) -> Any:
            seen.append(inside_of_function())
            return grads

    seen.append(inside_of_function())
    Looks.apply(torch.ones(2, requires_grad=True)).sum().backward()
    seen.append(inside_of_function())
    assert seen == [False, True, False, False]
