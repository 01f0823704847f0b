"""What ranks do in tests of what goes wrong: each returns the text of the error it got, or what it saw."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import torch
from tests.ddp import models
from tests.ddp.models import batch, loss_of, seeded
from tests.ddp.scenarios import TINY_MB
from torch import nn

from partita.ddp import bf16_compress, partita_ddp, replicate
from partita.planning import Cluster, Gradient, plan_buckets
from partita.runtime import Comm, Handle


def text_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class ByRank(nn.Module):
    """Every rank computes something else."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body = models.mlp()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return x.sin() if self.rank else x.cos()


def disagreements(comm: Comm) -> dict[str, str]:
    torch.set_num_threads(1)
    texts = {}
    texts["shape"] = text_of(replicate, nn.Linear(3, 3 + comm.rank))
    names = ("a", "b") if comm.rank else ("b", "a")
    texts["names"] = text_of(replicate, nn.ModuleDict({name: nn.Linear(2, 2) for name in names}))
    torch.manual_seed(comm.rank)
    texts["values"] = text_of(replicate, nn.Linear(3, 3), initial="check")
    texts["cap"] = text_of(replicate, nn.Linear(3, 3), bucket_cap_mb=1 + comm.rank)
    texts["tuned"] = text_of(replicate, nn.Linear(3, 3), plan=("measured", None)[comm.rank])
    texts["hook"] = text_of(replicate, nn.Linear(3, 3), comm_hook=(bf16_compress, None)[comm.rank])
    texts["plans"] = other_plans(comm)
    texts["refused"] = text_of(replicate, nn.Linear(3, 3), bucket_cap_mb=1 - comm.rank)
    texts["unknown"] = text_of(replicate, nn.Linear(3, 3), ignored=["no"][: comm.rank])
    module = replicate(seeded(lambda: ByRank(comm.rank)), inner="aot_eager", check_graphs=True)
    run = torch.compile(module, backend=partita_ddp)
    texts["graphs"] = text_of(lambda: loss_of(run(batch(0, comm.rank))).backward())
    module.replication.close()
    module = replicate(seeded(lambda: ByRank(comm.rank)), inner="aot_eager")
    run = torch.compile(module, backend=partita_ddp)
    texts["graphs allowed"] = text_of(lambda: loss_of(run(batch(0, comm.rank))).backward())
    module.replication.close()
    module = replicate(seeded(lambda: ByRank(0)), inner="aot_eager", check_graphs=True)
    run = torch.compile(module, backend=partita_ddp)
    for step in range(3):
        loss_of(run(batch(step, comm.rank))).backward()
    module.rank = comm.rank  # rank 1 compiles another graph, later
    texts["graphs later"] = text_of(
        lambda: [loss_of(run(batch(step, comm.rank))).backward() for step in range(3)]
    )
    module = replicate(seeded(models.mlp))
    texts["steps"] = text_of(_out_of_step, module, comm.rank)
    texts["hook raised"] = text_of(_train, replicate(nn.Linear(2, 2), comm_hook=_raises_on_rank_1))
    texts["raised"], texts["after it"] = raising(comm)
    texts["drift"], texts["after its advice"] = drifting(comm)
    module = replicate(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train(comm.rank == 0))
    texts["modes"] = text_of(_train, module)
    return texts


def drifting(comm: Comm) -> tuple[str, str]:
    """A learning rate by rank: what is said of it, and of training after the advice has been followed."""

    def trained(rate: float) -> None:
        for _ in range(3):
            module(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(module.parameters(), rate).step()

    module: Any = replicate(nn.Linear(2, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(0.1 * (1 + comm.rank))
    module.replication.close()
    replicate(module)
    after = text_of(trained, 0.1)
    module.replication.close()
    weights = comm.all_gather_object(module.weight.tolist())
    return "; ".join(str(one.message) for one in caught), after if weights[0] == weights[1] else str(weights)


def _raises_on_rank_1(flat: torch.Tensor, comm: Comm) -> Handle:
    if comm.rank:
        raise ValueError("no compression today")
    return bf16_compress(flat, comm)


def _train(module: Any) -> None:
    for _ in range(3):
        module(torch.randn(4, 2)).square().sum().backward()


def _out_of_step(module: Any, rank: int) -> None:
    if rank:
        with module.no_sync():
            loss_of(module(batch(0, rank))).backward()
    loss_of(module(batch(0, rank))).backward()
    loss_of(module(batch(1, rank))).backward()
    module.replication.close()


def other_plans(comm: Comm) -> str:
    """The text of the error; gradients are reduced as before after it, or this raises."""
    module = replicate(seeded(models.mlp))
    gradients = [Gradient(name, 8, 0.0) for name, _ in module.named_parameters()]
    cap_bytes = 8 * (1 + comm.rank)
    text = text_of(module.replication.use, plan_buckets(gradients, Cluster(2), bucket_cap_bytes=cap_bytes))
    loss_of(module(batch(0, comm.rank))).backward()
    module.replication.close()
    return text


def survivors(comm: Comm) -> tuple[str, float]:
    """Rank 1 is killed between two steps; how the others learn of it, and after how many seconds."""
    torch.set_num_threads(1)
    module = replicate(seeded(models.mlp), bucket_cap_mb=TINY_MB, inner="aot_eager")
    run = torch.compile(module, backend=partita_ddp)
    for step in range(3):
        loss_of(run(batch(step, comm.rank))).backward()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    text = text_of(lambda: loss_of(run(batch(9, comm.rank))).backward())
    return text, time.monotonic() - started


def raising(comm: Comm) -> tuple[str, str]:
    """Rank 1 raises within its backward pass and goes on; at its next step all learn of it. Whether the step
    after that is right.
    """
    module = replicate(seeded(models.mlp), bucket_cap_mb=TINY_MB)

    def refuse(_gradient: torch.Tensor) -> None:
        raise ValueError("not today")

    if comm.rank == 1:
        handle = module[0].weight.register_hook(refuse)
        text_of(lambda: loss_of(module(batch(0, 1))).backward())
        handle.remove()
    text = text_of(lambda: loss_of(module(batch(0, comm.rank))).backward())
    module.zero_grad()
    loss_of(module(batch(5, comm.rank))).backward()
    whole = seeded(models.mlp)
    for rank in range(2):
        (loss_of(whole(batch(5, rank))) / 2).backward()
    same = all(
        torch.allclose(a.grad, b.grad) for a, b in zip(whole.parameters(), module.parameters(), strict=True)
    )
    return text, "equal" if same else "different"


def four_ranks(comm: Comm) -> float:
    """The largest difference from torch's DDP."""
    torch.set_num_threads(1)
    wrapped = nn.parallel.DistributedDataParallel(seeded(models.mlp))
    module: Any = replicate(seeded(models.mlp), bucket_cap_mb=TINY_MB, inner="aot_eager")
    run = torch.compile(module, backend=partita_ddp)
    worst = 0.0
    for step in range(4):
        for each in (wrapped, run):
            each.zero_grad()
            loss_of(each(batch(step, comm.rank))).backward()
        for left, right in zip(wrapped.parameters(), module.parameters(), strict=True):
            worst = max(worst, float((left.grad - right.grad).abs().max()))
    return worst
