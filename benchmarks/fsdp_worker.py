"""One rank of the benchmark ``fsdp_overlap``, in a network namespace of its own."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.ddp_network import sent_bytes, set_rate
from benchmarks.ddp_ways import Step, trainer
from benchmarks.ddp_worker import print_line, print_nothing, turns, warm
from benchmarks.fsdp_ways import MODELS, WAYS, Setting, Sizes, make_model

__all__ = ["ALONE", "NETWORK", "UNLIMITED", "checked_step", "main", "mean_gradients", "tasks"]

ALONE, NETWORK = "computing alone", "network alone"
"""References that are no way of training."""

UNLIMITED = "unlimited"
"""In place of a relation: the link as fast as the machine makes it."""

_TOLERANCE = 1e-4


def tasks(settings: dict[str, Any]) -> list[str]:
    """Return what is done, one after the other; rank 0 prints a line after each.

    Args:
        settings: ``ways``; ``relations`` of network to computing, as text; ``rounds``.
    """
    compiling = [f"compiling {way}" for way in settings["ways"]]
    rounds = [f"round {number} of {settings['rounds']}" for number in range(settings["rounds"] + 1)]
    return [*compiling, "computing alone", *rounds]


def main(arguments: list[str]) -> None:
    """Measure all ways of training at all speeds of the links, in turn; rank 0 writes the seconds."""
    rank, size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    done = print_line if rank == 0 else print_nothing
    setting = Setting(MODELS[settings["model"]], init_device_mesh("cpu", (size,)), settings["backend"])
    batch = setting.sizes.batch(rank)
    expected = mean_gradients(setting.sizes, batch)
    steps, problems = warm(
        settings["ways"], lambda way: checked_step(WAYS[way](setting), batch, expected), done
    )
    alone = trainer(torch.compile(make_model(setting.sizes), backend=setting.backend), batch)
    for _ in range(4):
        alone()
    compute_s = statistics.median(turns({ALONE: alone}, settings["rounds"], print_nothing)[ALONE])
    done()
    rates = _rates(setting.sizes, size, settings["relations"], compute_s)
    network = _network(setting.sizes, size)
    subjects = {
        f"{relation}/{name}": step
        for name, step in {ALONE: alone, NETWORK: network, **steps}.items()
        for relation in rates
    }
    seconds = turns(subjects, settings["rounds"], done, lambda name: set_rate(rates[name.partition("/")[0]]))
    if rank == 0:
        result = {"megabits_per_s": rates, "seconds": seconds, "problems": problems}
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()


def mean_gradients(sizes: Sizes, batch: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the model that is neither sharded nor compiled; the mean of all ranks."""
    model = make_model(sizes)
    trainer(model, batch)()
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def checked_step(model: Any, batch: torch.Tensor, expected: Sequence[torch.Tensor]) -> Step:
    """A step of training that was taken twice, with the gradients that are expected.

    Raises:
        ArithmeticError: they are others.
    """
    step = trainer(model, batch)
    for _ in range(2):
        step()
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        error = float((whole - gradient).norm() / gradient.norm())
        if not error <= _TOLERANCE:
            raise ArithmeticError(f"the gradient of {name} is off by {error:.1e} of its norm")
    return step


def _rates(sizes: Sizes, ranks: int, relations: Sequence[str], compute_s: float) -> dict[str, float | None]:
    """Megabits a second for each relation, by what the collectives send; None is without a limit."""
    network = _network(sizes, ranks)
    network()
    dist.barrier()
    before = sent_bytes()
    network()
    megabits = torch.tensor(8e-6 * (sent_bytes() - before), dtype=torch.float64)
    dist.all_reduce(megabits, dist.ReduceOp.MAX)
    rates: dict[str, float | None] = {UNLIMITED: None}
    return rates | {relation: float(megabits) / (float(relation) * compute_s) for relation in relations}


def _network(sizes: Sizes, ranks: int) -> Callable[[], None]:
    """The collectives of a step, and nothing else.

    Each block is gathered for its forward pass and anew for its backward pass, and its gradients are summed.
    """
    lengths = [sum(p.numel() for p in block.parameters()) for block in make_model(sizes).blocks]
    shards = [torch.zeros(-(-length // ranks)) for length in lengths]
    blocks = [torch.zeros(ranks * shard.numel()) for shard in shards]

    def step() -> None:
        for whole, shard in zip(blocks, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard)
        for whole, shard in zip(blocks, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard)
            dist.reduce_scatter_tensor(shard, whole)

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
