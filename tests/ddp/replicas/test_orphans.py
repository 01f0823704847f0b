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


def _trained_in_a_container(parts: tuple[nn.Module, nn.Module], comm: Any) -> Tensor:
    container = replicate(nn.ModuleList(parts), comm)
    gradient = _trained(*parts, comm.rank)
    container.replication.close()
    return gradient


def test_parts_of_a_container_that_is_kept_are_averaged() -> None:
    first, second = InProcessWorld(2).run(lambda comm: _trained_in_a_container(_parts(), comm))
    assert first.equal(second)


def test_parts_of_a_container_that_is_gone_are_refused_until_it_is_replicated_anew() -> None:
    def body(comm: Any) -> Tensor:
        parts = _parts()
        replicate(nn.ModuleList(parts), comm)
        gc.collect()
        with pytest.raises(ExecutionError, match=r"'1.bias' is not averaged.*the ModuleList that replicate"):
            _trained(*parts, comm.rank)
        return _trained_in_a_container(parts, comm)

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


def test_parts_that_are_frozen_when_their_container_goes_are_refused_once_they_train() -> None:
    def body(comm: Any) -> None:
        parts = _parts()
        container = replicate(nn.ModuleList(parts), comm)
        parts[0].requires_grad_(False)
        parts[1].requires_grad_(False)
        del container
        gc.collect()
        assert not parts[0].weight.requires_grad
        parts[0].requires_grad_(True)
        with pytest.raises(ExecutionError, match=r"'0.\w+' is not averaged"):
            _trained(*parts, comm.rank)

    InProcessWorld(2).run(body)


def test_gradients_that_are_only_looked_at_are_no_concern_of_replication() -> None:
    def body(comm: Any) -> float:
        first, second = _parts()
        replicate(nn.ModuleList([first, second]), comm)
        gc.collect()
        loss = second(first(torch.full((2, 3), comm.rank + 1.0))).sum()
        (gradient,) = torch.autograd.grad(loss, [second.bias])
        return gradient.item()

    assert InProcessWorld(2).run(body) == [2, 2]
