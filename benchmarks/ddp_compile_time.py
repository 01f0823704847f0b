"""How long does it take to compile 12 equal blocks in 12 buckets, against one graph compiled whole, and
against torch's regional compilation?

``partita bench ddp-compile-time``. The first two training steps of a fresh process with all caches off, in
seconds of CPU time of that process and of the compilers that it starts, one at a time, so that a busy machine
matters little. `whole` is DDP with ``optimize_ddp=False``, and so is the way that marks each block as a
``nested_compile_region``; neither hides communication. `blocks alone` compiles each block by itself, so that
DDP's hooks run in between. ``--only 'partita*'`` leaves ways out; `whole` is always measured.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters  # noqa: PLC2701, TID251
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_models import Sizes, make_model
from benchmarks.harness import MIN_ROUNDS, Ratio, chosen_cells, progress_bar, ratio, write_json
from partita.ddp import partita_ddp, replicate, use_partita_ddp_optimizer

__all__ = ["WAYS", "Regions", "Row", "main"]

WAYS = (
    *("whole", "nested_compile_region", "blocks alone"),
    *("DDPOptimizer of torch", "DDPOptimizer of partita", "partita_ddp"),
)
_ROOT = Path(__file__).resolve().parent.parent
_WIDTH = 512  # a block is just above 1 MiB, the cap of the buckets


@dataclass(frozen=True)
class Row:
    """One way; CPU seconds are a median, the ratio is to `whole`."""

    way: str
    seconds: float
    over_whole: Ratio


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    only: Sequence[str] = (),
) -> list[Row]:
    """Measure, print a table, and write JSON where a path is given.

    Args:
        quick: two blocks, not compiled, one round: whether it runs, not how fast.
        only: patterns of the ways to measure.

    Raises:
        UsageError: a pattern matches no way.
    """
    console = console or Console()
    chosen = chosen_cells(WAYS, only)
    ways = [way for way in WAYS if way in chosen or way == "whole"]
    blocks, backend, rounds = (2, "aot_eager", 1) if quick else (12, "inductor", MIN_ROUNDS)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with progress_bar(console, f"{blocks} blocks", ways * rounds) as done:
        for way in ways * rounds:
            seconds[way].append(_in_a_fresh_process(way, blocks, backend))
            done()
    rows = [Row(way, statistics.median(seconds[way]), ratio(seconds[way], seconds["whole"])) for way in ways]
    table = Table("way", "CPU seconds", "over whole", title=f"{blocks} equal blocks, {backend}")
    for row in rows:
        table.add_row(row.way, f"{row.seconds:.1f}", str(row.over_whole))
    console.print(table)
    write_json(json_path, "ddp_compile_time", rows)
    return rows


@torch.compiler.nested_compile_region
def _region(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


class Regions(nn.Module):
    """Blocks, each of them a region that torch.compile may compile once for all."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = _region(block, x)
        return x


def _in_a_fresh_process(way: str, blocks: int, backend: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.ddp_compile_time", way, str(blocks), backend, folder],
            cwd=_ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    return float(result.stdout.split()[-1])


def _child(way: str, blocks: int, backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    sizes = Sizes("mlp", blocks, _WIDTH, rows=16)
    model: Any = make_model(sizes)
    context: Any = nullcontext()
    if way == "nested_compile_region":
        model = Regions(model.blocks)
    run: Any
    if way == "blocks alone":
        # not block.compile(): of an nn.Sequential it compiles nothing (torch 2.13)
        compiled: list[Any] = [torch.compile(block, backend=backend) for block in model.blocks]
        model.blocks = nn.ModuleList(compiled)
        run = DistributedDataParallel(model, bucket_cap_mb=1)
    elif way == "partita_ddp":
        run = torch.compile(replicate(model, bucket_cap_mb=1, inner=backend), backend=partita_ddp)
    else:
        run = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=backend)
    if way in ("whole", "nested_compile_region"):
        context = torch._dynamo.config.patch(optimize_ddp=False)  # noqa: SLF001, TID251
    elif way == "DDPOptimizer of partita":
        context = use_partita_ddp_optimizer()
    started = _cpu_s()
    with context:
        for step in range(2):
            run(sizes.batch(step)).square().mean().backward()
    used_s = _cpu_s() - started
    if not counters["stats"]["unique_graphs"]:
        raise RuntimeError(f"{way!r} compiled nothing")
    print(used_s)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
