"""Data parallel on a real GPU: both ranks on the same one, and one rank over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ddp import models
from tests.ddp.models import WIDTH, batch, seeded
from tests.ddp.scenarios import TINY_MB
from tests.on_gpu import DEVICE, NEEDS_CUDA, ON_GPU, moved
from tests.runtime.worlds import ProcessWorld, patience
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from partita.cudagraphs import CudaGraphsRunner
from partita.ddp import partita_ddp, replicate
from partita.runtime import Comm

pytestmark = ON_GPU

STEPS = 4
HOWS = ("as it is", "aot_eager", "recorded")


class Normed(nn.Module):
    """Buffers that each rank writes, and a layer that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.never = models.mlp(), nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def _trained(module: Any, rank: int) -> list[Any]:
    inside = getattr(module, "_orig_mod", module)
    optimizer = torch.optim.SGD(inside.parameters(), 0.1)
    seen: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step, rank).to(DEVICE)).square().mean().backward()
        seen += [parameter.grad for parameter in inside.parameters()]
        optimizer.step()
    return moved([*seen, *(value.clone() for value in inside.state_dict().values())], "cpu")


def _ours(how: str) -> tuple[Any, Any]:
    inner = {"aot_eager": "aot_eager", "recorded": CudaGraphsRunner()}.get(how)
    options = {} if inner is None else {"inner": inner}
    module: Any = replicate(seeded(Normed).to(DEVICE), bucket_cap_mb=TINY_MB, **options)
    return module, module if how == "as it is" else torch.compile(module, backend=partita_ddp)


def _assert_equal(actual: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def _like_torchs(comm: Comm) -> list[str]:
    torch.set_num_threads(1)
    wrapped = DistributedDataParallel(seeded(Normed).to(DEVICE), find_unused_parameters=True)
    expected = _trained(wrapped, comm.rank)
    for how in HOWS:
        torch.compiler.reset()
        module, run = _ours(how)
        _assert_equal(_trained(run, comm.rank), expected)
        module.replication.close()
    return list(HOWS)


@NEEDS_CUDA
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_two_processes_on_one_gpu_train_as_torchs_ddp_does(backend: str) -> None:
    with patience(150.0):
        assert ProcessWorld(2, backend).run(_like_torchs) == [list(HOWS)] * 2


@NEEDS_CUDA
@pytest.mark.parametrize("how", HOWS)
def test_one_rank_of_nccl_trains_as_the_model_alone(how: str) -> None:
    alone = _trained(seeded(Normed).to(DEVICE), 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module, run = _ours(how)
        _assert_equal(_trained(run, 0), alone)
        module.replication.close()
    finally:
        dist.destroy_process_group()
