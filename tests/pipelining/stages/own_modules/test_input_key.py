from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from partita.pipelining.stages.own_modules.input_key import input_key


def _mask(offset: Tensor, size: int = 128) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q + offset.sum() >= k, 2, None, size, size, device="cpu")


@dataclass
class Holder:
    tensor: Tensor
    call: Callable[[], Any]


def _holder(size: int) -> Holder:
    return Holder(torch.zeros(size), lambda: size)


MODULE = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: torch.rand(2, 3), lambda: torch.rand(2, 4)),
        (lambda: torch.rand(2, 3), lambda: torch.rand(3, 2).t()),
        (lambda: torch.rand(2), lambda: torch.rand(2, requires_grad=True)),
        (lambda: {"x": [torch.rand(2), 1]}, lambda: {"x": [torch.rand(2), True]}),
        (lambda: {"x": 1.0}, lambda: {"y": 1.0}),
        (lambda: _mask(torch.rand(1)), lambda: _mask(torch.rand(1), 256)),
        (lambda: _holder(2), lambda: _holder(3)),
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
        (lambda: MODULE.forward, lambda: nn.Linear(2, 2).forward),
    ],
)
def test_keys_are_equal_for_one_kind_and_differ_for_two(
    make: Callable[[], Any], other: Callable[[], Any]
) -> None:
    assert input_key(make()) == input_key(make())
    assert hash(input_key(make())) == hash(input_key(make()))
    assert input_key(make()) != input_key(other())


def test_what_holds_itself_has_a_key() -> None:
    def make() -> Any:
        def call() -> Any:
            return call

        return call

    assert input_key(make()) == input_key(make())


def test_a_module_is_only_itself() -> None:
    left, right = (nn.Linear(2, 2) for _ in range(2))
    assert input_key(left) == input_key(left)
    assert input_key(left) != input_key(right)
