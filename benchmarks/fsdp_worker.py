"""One rank of the benchmark ``fsdp_overlap``, in a network namespace of its own."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ddp_models import MODELS, make_model
from benchmarks.ddp_network import set_rate
from benchmarks.ddp_ways import Step, trainer
from benchmarks.ddp_worker import turns, warm
from benchmarks.fsdp_ways import WAYS, Setting, Sharded

__all__ = ["REFERENCES", "main", "tasks"]

REFERENCES = ("alone", "alone in eager mode", "network")
"""References that are no way of training: no communication, or nothing else."""


def tasks(settings: dict[str, Any]) -> list[str]:
    """Return what is done, one after the other; rank 0 prints a line after each.

    Args:
        settings: ``cells``, from each relation of network to computing (as text) to its ways; ``rounds``.
    """
    titles = [*(f"compiling {way}" for way in _ways(settings)), "computing alone"]
    for relation in settings["cells"]:
        rounds = settings["rounds"]
        titles += [
            f"network = {relation} computing, round {number} of {rounds}" for number in range(rounds + 1)
        ]
    return titles


def _ways(settings: dict[str, Any]) -> list[str]:
    return [way for way in WAYS if any(way in ways for ways in settings["cells"].values())]


def main(arguments: list[str]) -> None:
    """Measure all ways of training at all speeds of the links; rank 0 writes the seconds."""
    rank, size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    sizes, backend = MODELS[settings["model"]], settings["backend"]
    setting = Setting(sizes, sizes.batch(rank), backend, init_device_mesh("cpu", (size,)))
    sharded: dict[str, Sharded] = {}

    def done() -> None:
        if rank == 0:
            print(flush=True)

    def step_of(way: str) -> Step:
        sharded[way] = WAYS[way](setting)
        return sharded[way].step

    steps, problems = warm(_ways(settings), step_of, done)
    references = _references(setting)
    alone = turns({"alone": references["alone"]}, settings["rounds"], lambda: None)["alone"]
    compute_s = statistics.median(alone)
    done()
    # two all-gathers and a reduce-scatter; gloo's takes twice the time of an all-gather
    bits = 8 * 4 * sum(map(sum, _bytes_of_blocks(setting))) * (size - 1) / size
    results = []
    for relation, ways in settings["cells"].items():
        megabits_per_s = bits / (float(relation) * compute_s) / 1e6
        set_rate(megabits_per_s)
        of_this_cell = {way: steps[way] for way in ways if way in steps}
        results.append(
            {
                "relation": float(relation),
                "megabits_per_s": megabits_per_s,
                "seconds": turns(references | of_this_cell, settings["rounds"], done),
                "problems": {way: problems[way] for way in ways if way in problems},
                "graphs": {way: sharded[way].compilation.graphs for way in of_this_cell},
                "guards": {way: sharded[way].compilation.guards for way in of_this_cell},
            }
        )
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()


def _bytes_of_blocks(setting: Setting) -> list[list[int]]:
    """Of each parameter of each block."""
    return [
        [p.numel() * p.element_size() for p in block.parameters()]
        for block in make_model(setting.sizes).blocks
    ]


def _references(setting: Setting) -> dict[str, Step]:
    size = setting.mesh.size()
    elements = [-(-sum(block) // (4 * size)) for block in _bytes_of_blocks(setting)]
    shards = [torch.zeros(count) for count in elements]
    wholes = [torch.zeros(count * size) for count in elements]

    def network() -> None:
        """What FSDP sends in a step: parameters forward and backward, gradients backward."""
        for _ in range(2):
            gathers = [
                dist.all_gather_into_tensor(whole, shard, async_op=True)
                for whole, shard in zip(wholes, shards, strict=True)
            ]
            for work in gathers:
                work.wait()
        scatters = [
            dist.reduce_scatter_tensor(shard, whole, async_op=True)
            for whole, shard in zip(wholes, shards, strict=True)
        ]
        for work in scatters:
            work.wait()

    alone: Any = torch.compile(make_model(setting.sizes), backend=setting.backend)
    references = {
        "alone": trainer(alone, setting.batch),
        "alone in eager mode": trainer(make_model(setting.sizes), setting.batch),
        "network": network,
    }
    for step in references.values():
        step()
    return references


if __name__ == "__main__":
    main(sys.argv[1:])
