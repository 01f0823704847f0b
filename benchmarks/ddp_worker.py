"""One rank of the benchmark ``ddp_overlap``, in a network namespace of its own."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_models import MODELS, Sizes, make_model
from benchmarks.ddp_network import set_rate
from partita.ddp import partita_ddp, replicate, use_partita_ddp_optimizer

__all__ = ["PLANNED", "REFERENCES", "main", "tasks"]

REFERENCES = ("alone", "alone in eager mode", "forward", "network")
"""References that are no way of training: no communication, or nothing else."""

PLANNED = "partita_ddp, planned"
"""The way whose buckets are planned anew for each speed of the links."""

_CAP_MB = 4


def tasks(settings: dict[str, Any]) -> list[str]:
    """Return what is done, one after the other; rank 0 prints a line after each."""
    titles = ["compiling", "computing alone"]
    for relation in settings["relations"]:
        titles.append(f"planning buckets for network = {relation:g} computing")
        titles += [f"round {number} of {settings['rounds']}" for number in range(settings["rounds"] + 1)]
    return titles


def main(arguments: list[str]) -> None:
    """Measure all ways of training at all speeds of the links; rank 0 writes the seconds."""
    rank, size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    sizes = MODELS[settings["model"]]
    done = _print_line if rank == 0 else _print_nothing
    planned: Any = replicate(make_model(sizes), inner=settings["backend"])
    steps = _steps(sizes, rank, settings["backend"], planned)
    for step in steps.values():
        for _ in range(4):
            step()
    done()
    alone = _turns({"alone": steps["alone"]}, settings["rounds"], _print_nothing)["alone"]
    compute_s = statistics.median(alone)
    done()
    parameters = sum(p.numel() * p.element_size() for p in make_model(sizes).parameters())
    results = []
    for relation in settings["relations"]:
        bits = 8 * parameters * 2 * (size - 1) / size
        megabits_per_s = bits / (relation * compute_s) / 1e6
        set_rate(megabits_per_s)
        _plan(planned, steps[PLANNED])
        done()
        seconds = _turns(steps, settings["rounds"], done)
        results.append({"relation": relation, "megabits_per_s": megabits_per_s, "seconds": seconds})
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()


def _print_line() -> None:
    print(flush=True)


def _print_nothing() -> None:
    pass


def _plan(module: Any, step: Callable[[], None]) -> None:
    replication = module.replication
    with replication.measuring():
        for _ in range(5):
            step()
    replication.use(replication.plan())
    for _ in range(2):
        step()


def _steps(sizes: Sizes, rank: int, backend: Any, planned: Any) -> dict[str, Callable[[], None]]:
    x = sizes.batch(rank)

    def trainer(module: Any) -> Callable[[], None]:
        def step() -> None:
            module.zero_grad()
            module(x).square().mean().backward()

        return step

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(make_model(sizes), bucket_cap_mb=_CAP_MB)

    def under(context: Any, module: Any) -> Callable[[], None]:
        inner = trainer(torch.compile(module, backend=backend))

        def step() -> None:
            with context():
                inner()

        return step

    ours: Any = replicate(make_model(sizes), bucket_cap_mb=_CAP_MB, inner=backend)
    flat = [p.detach().clone() for p in make_model(sizes).parameters()]

    def network() -> None:
        size, pending = 0, []
        bucket: list[torch.Tensor] = []
        for tensor in flat:
            bucket.append(tensor.reshape(-1))
            size += tensor.numel() * tensor.element_size()
            if size >= _CAP_MB * 2**20:
                pending.append(dist.all_reduce(torch.cat(bucket), async_op=True))
                size, bucket = 0, []
        if bucket:
            pending.append(dist.all_reduce(torch.cat(bucket), async_op=True))
        for work in pending:
            work.wait()

    alone: Any = torch.compile(make_model(sizes), backend=backend)
    return {
        "alone": trainer(alone),
        "alone in eager mode": trainer(make_model(sizes)),
        "forward": lambda: alone(x).square().mean(),
        "network": network,
        "DDP": trainer(wrapped()),
        "DDP compiled": under(_whole, wrapped()),
        "DDPOptimizer of torch": trainer(torch.compile(wrapped(), backend=backend)),
        "DDPOptimizer of partita": under(use_partita_ddp_optimizer, wrapped()),
        "partita_ddp": trainer(torch.compile(ours, backend=partita_ddp)),
        PLANNED: trainer(torch.compile(planned, backend=partita_ddp)),
    }


def _whole() -> Any:
    return torch._dynamo.config.patch(optimize_ddp=False)  # noqa: SLF001, TID251


def _turns(
    steps: dict[str, Callable[[], None]], rounds: int, done: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each, in turn; those of the slowest rank. `done` is called after each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            started = time.monotonic()
            step()
            taken = torch.tensor(time.monotonic() - started, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number:
                seconds[name].append(float(taken))
        done()
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
