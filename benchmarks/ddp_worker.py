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

from benchmarks.ddp_models import MODELS, make_model
from benchmarks.ddp_network import set_rate
from benchmarks.ddp_ways import CAP_MB, PLANNED, WAYS, Setting, Step, trainer
from benchmarks.harness import first_line
from partita.ddp import replicate

__all__ = ["REFERENCES", "main", "print_line", "print_nothing", "tasks", "turns", "warm"]

REFERENCES = ("alone", "alone in eager mode", "forward", "network")
"""References that are no way of training: no communication, or nothing else."""


def tasks(settings: dict[str, Any]) -> list[str]:
    """Return what is done, one after the other; rank 0 prints a line after each.

    Args:
        settings: ``cells``, from each relation of network to computing (as text) to its ways; ``rounds``.
    """
    titles = ["compiling the references", *(f"compiling {way}" for way in _ways(settings))]
    titles.append("computing alone")
    for relation in settings["cells"]:
        titles.append(f"planning buckets for network = {relation} computing")
        titles += [f"round {number} of {settings['rounds']}" for number in range(settings["rounds"] + 1)]
    return titles


def _ways(settings: dict[str, Any]) -> list[str]:
    """The ways of all cells, in the order of `WAYS`."""
    return [way for way in WAYS if any(way in ways for ways in settings["cells"].values())]


def main(arguments: list[str]) -> None:
    """Measure all ways of training at all speeds of the links; rank 0 writes the seconds."""
    rank, size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    sizes, backend = MODELS[settings["model"]], settings["backend"]
    done = print_line if rank == 0 else print_nothing
    replica: Any = replicate(make_model(sizes), inner=backend)
    setting = Setting(sizes, sizes.batch(rank), backend, replica)
    references = _references(setting)
    for step in references.values():
        _warm_up(step)
    done()
    steps, problems = warm(_ways(settings), lambda way: WAYS[way](setting), done)
    alone = turns({"alone": references["alone"]}, settings["rounds"], print_nothing)["alone"]
    compute_s = statistics.median(alone)
    done()
    parameters = sum(p.numel() * p.element_size() for p in make_model(sizes).parameters())
    results = []
    for relation, ways in settings["cells"].items():
        bits = 8 * parameters * 2 * (size - 1) / size
        megabits_per_s = bits / (float(relation) * compute_s) / 1e6
        set_rate(megabits_per_s)
        if PLANNED in ways and PLANNED in steps:
            _plan(replica, steps[PLANNED])
        done()
        of_this_cell = {way: steps[way] for way in ways if way in steps}
        results.append(
            {
                "relation": float(relation),
                "megabits_per_s": megabits_per_s,
                "seconds": turns(references | of_this_cell, settings["rounds"], done),
                "problems": {way: problems[way] for way in ways if way in problems},
            }
        )
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()


def warm(
    ways: list[str], make: Callable[[str], Step], done: Callable[[], None]
) -> tuple[dict[str, Step], dict[str, str]]:
    """Make a step of each way and run it until it is compiled; why where that can't be done on some rank.

    Args:
        done: called after each way.
    """
    steps: dict[str, Step] = {}
    problems: dict[str, str] = {}
    for way in ways:
        problem = ""
        try:
            step = make(way)
            _warm_up(step)
            steps[way] = step
        except Exception as error:
            problem = first_line(error)
        of_all: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(of_all, problem)
        if any(of_all):
            steps.pop(way, None)
            problems[way] = next(filter(None, of_all))
        done()
    return steps, problems


def _warm_up(step: Step) -> None:
    for _ in range(4):
        step()


def print_line() -> None:
    """Tell the process that shows the progress that one task is done."""
    print(flush=True)


def print_nothing() -> None:
    """Of the ranks but the first."""


def _plan(module: Any, step: Step) -> None:
    replication = module.replication
    with replication.measuring():
        for _ in range(5):
            step()
    replication.use(replication.plan())
    for _ in range(2):
        step()


def _references(setting: Setting) -> dict[str, Step]:
    flat = [p.detach().clone() for p in make_model(setting.sizes).parameters()]

    def network() -> None:
        size, pending = 0, []
        bucket: list[torch.Tensor] = []
        for tensor in flat:
            bucket.append(tensor.reshape(-1))
            size += tensor.numel() * tensor.element_size()
            if size >= CAP_MB * 2**20:
                pending.append(dist.all_reduce(torch.cat(bucket), async_op=True))
                size, bucket = 0, []
        if bucket:
            pending.append(dist.all_reduce(torch.cat(bucket), async_op=True))
        for work in pending:
            work.wait()

    alone: Any = torch.compile(make_model(setting.sizes), backend=setting.backend)
    return {
        "alone": trainer(alone, setting.batch),
        "alone in eager mode": trainer(make_model(setting.sizes), setting.batch),
        "forward": lambda: alone(setting.batch).square().mean(),
        "network": network,
    }


def turns(
    steps: dict[str, Step],
    rounds: int,
    done: Callable[[], None],
    prepare: Callable[[str], None] = lambda _name: None,
) -> dict[str, list[float]]:
    """Seconds of each, in turn; those of the slowest rank.

    Args:
        done: called after each round.
        prepare: called with the name of each before it is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            prepare(name)
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
