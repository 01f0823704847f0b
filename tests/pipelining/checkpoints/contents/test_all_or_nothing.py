"""Loading that fails, at whatever point, leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.contents.all_or_nothing import put, unchanged_on_error
from partita.runtime import Comm


class _Picky(nn.Module):
    """Refuses the extra state of another; draws a random number before it does."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen = seen

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        torch.rand(1)
        if self.seen == 2 and state == 1:
            raise ValueError("not mine")
        self.seen = state


class _BrokenSGD(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("no room")


def _trained(seed: int, kind: type[torch.optim.SGD]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), _Picky(seed).inner)
    optimizer = kind(model.parameters(), lr=seed / 10, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_that_fails_leaves_model_and_optimizers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, *_trained(1, torch.optim.SGD))
    model, optimizer = _trained(2, _BrokenSGD)
    values = [value.clone() for value in model.parameters()]
    moments = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    with pytest.raises(CheckpointError, match=r"could not be read: ValueError\('no room'\)"):
        load_checkpoint(tmp_path, model, optimizer)
    assert all(map(torch.equal, values, model.parameters()))
    assert all(map(torch.equal, moments, [state["momentum_buffer"] for state in optimizer.state.values()]))
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert next(model.parameters()) in optimizer.state


def test_extra_state_that_is_refused_leaves_random_numbers_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _Picky(1))
    model = _Picky(2)
    weight = model.inner.weight.detach().clone()
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="not mine"):
        load_checkpoint(tmp_path, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.inner.weight, weight)
    assert model.seen == 2


def test_a_tensor_that_gets_values_twice_gets_back_what_was_first() -> None:
    tensor = torch.zeros(2)

    def fails() -> None:
        with unchanged_on_error((), ()) as undo:
            put([(tensor, torch.ones(2)), (tensor, torch.full((2,), 2.0))], undo)
            assert tensor.tolist() == [1, 1]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert tensor.tolist() == [0, 0]


def _one_refuses(comm: Comm, path: str) -> tuple[str, bool]:
    torch.manual_seed(comm.rank)
    model = _Picky(comm.rank + 1)
    weight = model.inner.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model)
    return str(caught.value), torch.equal(model.inner.weight, weight) and model.seen == comm.rank + 1


def test_what_one_rank_can_not_load_no_rank_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _Picky(1))
    (first, is_as_before), (second, its_is) = ProcessWorld(2).run(_one_refuses, str(tmp_path))
    assert first == second
    assert first.startswith("rank 1: ")
    assert "not mine" in first
    assert is_as_before
    assert its_is
