"""Parts of a replicated module that outlive it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.ddp import replicate
from partita.errors import ExecutionError
from partita.runtime import InProcessWorld


def _parts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(3, 3), nn.Linear(3, 1)


def _trained(first: nn.Module, second: nn.Module, rank: int) -> Tensor:
    first.zero_grad()
    second(first(torch.full((2, 3), rank + 1.0))).sum().backward()
    gradient = first.weight.grad
    assert isinstance(gradient, Tensor)
    return gradient


def test_parts_of_a_container_that_is_kept_are_averaged() -> None:
    def body(comm: Any) -> Tensor:
        parts = _parts()
        container = replicate(nn.ModuleList(parts), comm)
        gradient = _trained(*parts, comm.rank)
        container.replication.close()
        return gradient

    first, second = InProcessWorld(2).run(body)
    assert first.equal(second)


def test_parts_of_a_container_that_is_gone_are_refused_until_it_is_replicated_anew() -> None:
    def body(comm: Any) -> Tensor:
        parts = _parts()
        replicate(nn.ModuleList(parts), comm)
        gc.collect()
        with pytest.raises(ExecutionError, match=r"'1.bias' is not averaged.*the ModuleList that replicate"):
            _trained(*parts, comm.rank)
        container = replicate(nn.ModuleList(parts), comm)
        gradient = _trained(*parts, comm.rank)
        container.replication.close()
        return gradient

    first, second = InProcessWorld(2).run(body)
    assert first.equal(second)


def test_parts_of_a_container_whose_replication_was_closed_train_alone() -> None:
    def body(comm: Any) -> Tensor:
        parts = _parts()
        replicate(nn.ModuleList(parts), comm).replication.close()
        gc.collect()
        return _trained(*parts, comm.rank)

    first, second = InProcessWorld(2).run(body)
    assert not first.equal(second)
