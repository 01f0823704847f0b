"""A model that ranks are given through ``torch.multiprocessing`` lies in memory that all of them see; each
rank trains its own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.pipelining.stages.placing.test_own_memory import Tied
from tests.runtime.worlds import endings
from torch import nn

from partita.ddp import replicate
from partita.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from partita.runtime import Comm
from partita.runtime.comms.shared_memory import leave_shared_memory

STEPS = 3


def test_tensors_that_share_a_storage_go_on_sharing_one() -> None:
    storage = torch.arange(6.0).share_memory_()
    whole, part, own = nn.Parameter(storage), storage[2:4], torch.ones(2)
    parameter = whole
    leave_shared_memory([whole, part, own])
    assert whole is parameter
    assert not whole.is_shared()
    assert part.data_ptr() == whole.data_ptr() + 2 * whole.element_size()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert storage.is_shared()
    assert torch.equal(own, torch.ones(2))


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(20, (8, 6), generator=generator) for _ in range(STEPS)]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _numbers(module: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in module.state_dict().items()}


def _pipelined(comm: Comm, pipe: Pipe) -> dict[str, bytes]:
    stage = pipe.build_stage(comm.rank, comm=comm)
    schedule = ScheduleGPipe(stage, 4, _loss)
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.1)
    for batch in _batches():
        schedule.step(*([batch] if comm.rank == 0 else []), target=batch)
        optimizer.step()
        optimizer.zero_grad()
        comm.barrier()  # both would have stepped what they share
    return _numbers(stage.module)


def _replicated(comm: Comm, model: nn.Module) -> dict[str, bytes]:
    replica: Any = replicate(model, comm)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for batch in _batches():
        mine = batch.chunk(2)[comm.rank]
        _loss(replica(mine), mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        comm.barrier()
    return _numbers(replica)


def _uncut(model: nn.Module, parts: int) -> dict[str, bytes]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _batches():
        for part in batch.chunk(parts):
            (_loss(model(part), part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _numbers(model)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def test_ranks_that_are_given_one_pipe_have_a_tied_weight_each(model: nn.Module) -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    pipe = pipeline(copy.deepcopy(model), (ids,), split_spec={"middle": SplitPoint.BEGINNING})
    expected = _uncut(model, 4)
    for ending in endings(2, _pipelined, pipe):
        assert ending.error is None, ending.text
        assert ending.result == {name: expected[name] for name in ending.result}


def test_replicas_that_are_given_one_model_are_stepped_once_each(model: nn.Module) -> None:
    expected = _uncut(copy.deepcopy(model), 2)
    for ending in endings(2, _replicated, model):
        assert ending.error is None, ending.text
        assert ending.result == expected
