"""Ranks that are processes of one thread each, over gloo on this machine, on cores of their own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from partita.runtime import ProcessGroupComm

__all__ = ["on_ranks", "timed"]

_GRACE_S = 10.0


def on_ranks(size: int, limit_s: float, body: Callable[..., Any], *args: Any, own_cores: bool = True) -> Any:
    """Run ``body(comm, *args)`` in so many processes; returns what rank 0 returns.

    Args:
        own_cores: keep each rank on a core of its own, where there are enough. Processes that it starts, such
            as those that compile, stay there too.

    Raises:
        RuntimeError: they still run after ``limit_s`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_process,
                args=(rank, size, limit_s, f"{folder}/store", there, body, args, own_cores),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        there.close()
        try:
            if not here.poll(limit_s):
                raise RuntimeError(
                    f"{size} ranks still run {args[0]} after {limit_s:g} s: try fewer ranks or rounds"
                )
            return here.recv()
        finally:
            for process in processes:
                process.join(_GRACE_S)
                process.kill()


def _process(
    rank: int,
    size: int,
    limit_s: float,
    path: str,
    answer: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    own_cores: bool,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if own_cores:
        _stay_on_core(rank, size)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit_s),
    )
    with ProcessGroupComm.from_group() as comm:
        result = body(comm, *args)
    if rank == 0:
        answer.send(result)
    dist.destroy_process_group()


def _stay_on_core(rank: int, size: int) -> None:
    """Keep this process, with the threads that it will start, on one core, where each rank can have its own:
    moved to another's core for a while, it would slow both down.
    """
    if hasattr(os, "sched_setaffinity") and len(cores := sorted(os.sched_getaffinity(0))) >= size:
        os.sched_setaffinity(0, {cores[rank]})


def timed(comm: ProcessGroupComm, step: Callable[[], object], *, alone: bool = False) -> float:
    """From the first rank's start to the last rank's end; they share a clock.

    Args:
        alone: of this rank only.
    """
    comm.barrier()
    started = time.monotonic()
    step()
    spans = comm.all_gather_object((started, time.monotonic()))
    if alone:
        spans = [spans[comm.rank]]
    return max(end for _, end in spans) - min(start for start, _ in spans)
