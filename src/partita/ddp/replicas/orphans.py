"""Parameters that live on, and are trained, where the module that was replicated does not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn

from partita.ddp.replicas.owners import Owners
from partita.errors import ExecutionError

__all__ = ["refuse_orphans"]


def refuse_orphans(module: nn.Module, trained: Mapping[str, torch.Tensor], owners: Owners[Any]) -> None:
    """Once ``module`` has gone with what replicates it, let backward passes to parameters of it that live on
    raise ExecutionError: their gradients would stay on their rank without a word.
    """
    parameters = {name: ref(parameter) for name, parameter in trained.items()}
    finalize(module, _watch, type(module).__name__, parameters, owners).atexit = False


def _watch(kind: str, parameters: Mapping[str, ref[torch.Tensor]], owners: Owners[Any]) -> None:
    for name, reference in parameters.items():
        parameter = reference()
        if parameter is not None and parameter.is_leaf:
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # a frozen one takes no hooks, and keeps those that it has
            # once it is in grad: what torch.autograd.grad returns is not averaged by anyone
            parameter.register_post_accumulate_grad_hook(partial(_check, reference, name, kind, owners))
            parameter.requires_grad_(is_trained)


def _check(
    reference: ref[torch.Tensor], name: str, kind: str, owners: Owners[Any], _parameter: torch.Tensor
) -> None:
    parameter = reference()
    if parameter is not None and owners.is_orphan(parameter):
        raise ExecutionError(
            f"a gradient of {name!r} is not averaged over the ranks: the {kind} that replicate() was called "
            "with is gone, and replication with it, while parts of it are trained. Keep that module for as "
            "long as they are; to train them on each rank alone, call its replication.close() before it goes"
        )
