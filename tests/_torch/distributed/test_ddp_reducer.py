from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.group_of_one import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from partita._torch.distributed.ddp_reducer import (
    FIRST_BUCKET_BYTES,
    ReducerFacts,
    active_reducer,
    is_ignored,
    replace_optimizer,
    replaced_optimizer,
)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with group_of_one():
        yield


class Asking(nn.Module):
    """Asks for the facts of its reducer in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.facts: list[ReducerFacts | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.facts.append(active_reducer())
        for layer in self.layers:
            x = layer(x)
        return x


def test_caps_and_rebuilt_buckets_are_those_of_the_running_module() -> None:
    assert active_reducer() is None
    model = Asking()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0004)
    for _ in range(4):
        wrapped(torch.ones(2, 8)).sum().backward()
    first, last = model.facts[0], model.facts[-1]
    assert first is not None
    assert last is not None
    assert first.caps_bytes == (419, 419)
    assert first.rebuilt is None
    assert last.rebuilt == ((3, 2), (1, 0))
    assert [id(p) for p in last.parameters] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "caps"),
    [
        ({}, (FIRST_BUCKET_BYTES, 25 * 2**20)),
        ({"bucket_cap_mb_list": [1, 2, 3]}, (2**20, 2 * 2**20, 3 * 2**20)),
    ],
)
def test_caps_are_as_given(options: dict[str, object], caps: tuple[int, ...]) -> None:
    model = Asking()
    DistributedDataParallel(model, **options)(torch.ones(2, 8))
    assert model.facts[0] is not None
    assert model.facts[0].caps_bytes == caps


def test_ignored_parameters_are_known() -> None:
    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert is_ignored(model.bias)
    assert not is_ignored(model.weight)


def test_the_optimizer_that_torch_takes_can_be_replaced() -> None:
    before = replaced_optimizer()
    replace_optimizer(int)
    assert replaced_optimizer() is int
    replace_optimizer(before)
    assert replaced_optimizer() is before
