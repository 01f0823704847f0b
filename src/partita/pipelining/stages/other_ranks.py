"""Calls of ``torch.distributed`` in a stage's part of ``forward``, for which other ranks have to come."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from partita._torch.operators.collectives import collectives_in
from partita.errors import ExecutionError

__all__ = ["check_ranks_come", "check_ranks_come_in"]


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


def _check(name: str, ranks: Sequence[int], processes: Collection[int], where: str) -> None:
    others = [rank for rank in ranks if rank in processes and rank != dist.get_rank()]
    if others:
        raise ExecutionError(
            f"torch.distributed.{name}() in {where}, is for ranks {ranks}, of which {others} run "
            "other stages of this pipeline and do not call it: give it a group of the ranks that run this "
            "stage, one a pipeline, or switch it off"
        )
