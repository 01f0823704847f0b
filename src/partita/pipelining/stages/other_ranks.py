"""Calls of ``torch.distributed`` in a stage's part of ``forward``, and data parallel wrappers around it, for
which other ranks have to come.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from partita._torch.modules.contents import modules_in, parameters_in
from partita._torch.operators.collectives import collectives_in
from partita.errors import ExecutionError
from partita.pipelining.stages.data_parallel import replicas_among

__all__ = ["check_ranks_come", "check_ranks_come_in", "check_replicas"]


def check_ranks_come(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    processes: Collection[int],
    where: str,
) -> None:
    """Check that no rank that runs other stages is waited for.

    Args:
        func: is about to be called with ``args`` and ``kwargs``.
        processes: the global ranks that run the pipeline's stages.
        where: names the module and the stage.

    Raises:
        ExecutionError: it is a collective over several of them.
    """
    if getattr(func, "__module__", "") != dist.all_reduce.__module__:
        return
    group = inspect.signature(func).bind(*args, **kwargs).arguments.get("group")
    _check(func.__name__, dist.get_process_group_ranks(group), processes, where)


def check_ranks_come_in(graphs: Iterable[GraphModule], processes: Collection[int], where: str) -> None:
    """The same for the collectives in graphs, which know a group by its name.

    Raises:
        ExecutionError: see `check_ranks_come`.
    """
    for gm in graphs:
        for name, ranks in collectives_in(gm):
            _check(name, ranks, processes, where)


def check_replicas(module: nn.Module, processes: Collection[int], stage: int) -> None:
    """Check that what is around a stage's module, or in it, has no replicas or shards of it on ranks that run
    other stages.

    Raises:
        ExecutionError: ``DistributedDataParallel``, ``fully_shard``, `partita.ddp.replicate` or
            `parallelize_module` was given such ranks, as it is by default.
    """
    if len(processes) < 2:
        return
    replicated, on_demand = replicas_among(modules_in(module))
    groups = {tuple(dist.get_process_group_ranks(part.process_group)) for part in replicated}
    groups |= {tuple(getattr(part.replication.comm, "processes", ())) for part in on_demand}
    meshes = {value.device_mesh for _, value in parameters_in(module) if isinstance(value, DTensor)}
    groups |= {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    for ranks in sorted(groups):
        others = _others(ranks, processes)
        if others:
            raise ExecutionError(
                f"stage {stage} is data parallel, or sharded, over ranks {list(ranks)}, of which {others} "
                "run other stages of this pipeline: its weights would be mixed with theirs. Give the wrapper "
                "a group or mesh of the ranks that run this stage, one a pipeline, and build the stages anew"
            )


def _others(ranks: Iterable[int], processes: Collection[int]) -> list[int]:
    """Those that run other stages."""
    return [rank for rank in ranks if rank in processes and rank != dist.get_rank()]


def _check(name: str, ranks: Sequence[int], processes: Collection[int], where: str) -> None:
    others = _others(ranks, processes)
    if others:
        raise ExecutionError(
            f"torch.distributed.{name}() in {where}, is for ranks {ranks}, of which {others} run "
            "other stages of this pipeline and do not call it: give it a group of the ranks that run this "
            "stage, one a pipeline, or switch it off"
        )
