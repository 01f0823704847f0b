"""What a guard of calls lets through; what goes through it is tested in `pipelining/compiled`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita._torch.compile.direct_graph import CallGuard

WEIGHT = nn.Parameter(torch.ones(3, 3))
X = torch.ones(2, 3)

OTHER_CALLS: dict[str, tuple[tuple[Any, ...], Callable[[], Any]]] = {
    "shape": ((WEIGHT, torch.ones(4, 3), 1), nullcontext),
    "strides": ((WEIGHT, torch.ones(3, 2).t(), 1), nullcontext),
    "dtype": ((WEIGHT, X.double(), 1), nullcontext),
    "device": ((WEIGHT, X.to("meta"), 1), nullcontext),
    "needs a gradient": ((WEIGHT, torch.ones(2, 3, requires_grad=True), 1), nullcontext),
    "no parameter": ((WEIGHT.detach().requires_grad_(), X, 1), nullcontext),
    "made in inference mode": ((WEIGHT, torch.inference_mode()(lambda: torch.ones(2, 3))(), 1), nullcontext),
    "number": ((WEIGHT, X, 2), nullcontext),
    "type": ((WEIGHT, X, True), nullcontext),
    "fewer": ((WEIGHT, X), nullcontext),
    "more": ((WEIGHT, X, 1, 1), nullcontext),
    "no gradients": ((WEIGHT, X, 1), torch.no_grad),
    "autocast": ((WEIGHT, X, 1), lambda: torch.autocast("cpu", torch.bfloat16)),
    "inference mode": ((WEIGHT, X, 1), torch.inference_mode),
}


def test_it_holds_for_other_tensors_of_that_kind() -> None:
    guard = CallGuard((WEIGHT, X, 1))
    assert guard.holds((WEIGHT, X, 1))
    assert guard.holds((nn.Parameter(torch.zeros(3, 3)), torch.zeros(2, 3), 1))
    assert CallGuard((WEIGHT, X)).holds((WEIGHT, X))


@pytest.mark.parametrize("what", OTHER_CALLS)
def test_it_does_not_hold_for_another_call(what: str) -> None:
    values, state = OTHER_CALLS[what]
    guard = CallGuard((WEIGHT, X, 1))
    with state():
        assert not guard.holds(values)
    assert guard.holds((WEIGHT, X, 1))


def test_it_does_not_hold_inside_of_a_transform_nor_for_one_tensor_twice() -> None:
    guard = CallGuard((X, torch.ones(2, 3)))
    assert not guard.holds((X, X))
    seen: list[bool] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(guard.holds((x, X)))
        return x

    torch.vmap(inside)(torch.ones(4, 2, 3))
    assert seen == [False]
