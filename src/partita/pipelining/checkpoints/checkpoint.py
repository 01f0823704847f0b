"""Checkpoints that do not know how the model was cut: written by any number of stages, read by any other
number, or by the uncut model.

They are ordinary ``torch.distributed.checkpoint`` directories. Every tensor is under the name that it has in
the model that was never cut, in the layout of ``dcp.save({"model": model.state_dict(), "optim": ...})``, so
what torch saved is read here, and the other way round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from partita._torch.tensors import has_memory
from partita.errors import CheckpointError
from partita.pipelining.checkpoints.aliased_writer import AliasedWriter
from partita.pipelining.checkpoints.checkpoint_source import EXTRA, CheckpointSource, reason
from partita.pipelining.checkpoints.optimizer_state import (
    Names,
    names_of,
    optimizer_entries,
    restore_optimizer,
)
from partita.pipelining.checkpoints.replicas import Entry, Replicas, share_out
from partita.pipelining.checkpoints.savers import savers_of
from partita.pipelining.listing import listed
from partita.pipelining.stages.held_state import Held, Stages, by_identity, held_state, stage_modules

__all__ = ["Restored", "load_checkpoint", "save_checkpoint"]

Optimizers = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True)
class Restored:
    """What `load_checkpoint` has to tell.

    Attributes:
        missing: names of parameters and buffers that the checkpoint does not have (with ``strict=False``).
        extra: what `save_checkpoint` was given as ``extra``.
    """

    missing: tuple[str, ...]
    extra: Mapping[str, Any]


def save_checkpoint(
    path: str | os.PathLike[str],
    stages: Stages,
    optimizers: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    replicas: Replicas = "equal",
    model_key: str = "model",
    optimizer_key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the state of stages, from all ranks into one checkpoint.

    Where ``torch.distributed`` is initialised this is collective over ``process_group``, whose ranks together
    hold the model (copies of it are fine: each name is written once, by one of its holders). In an
    `InProcessWorld` it is so over its ranks. Otherwise this process holds all stages.

    Args:
        path: a directory that all ranks can write to; made if it is not there.
        stages: this rank's stages, or a whole model.
        optimizers: of these stages.
        extra: plain values and tensors to keep beside, by name; rank 0's are kept. The ``state_dict()`` of
            the pipeline's schedule belongs here, since dropout depends on the number of the step, and that of
            a learning rate's scheduler.
        replicas: copies of one name (tied parameters, data parallel ranks) that differ by any bit are an
            error with ``equal``; with ``first`` the lowest rank's copy is written. Sharded tensors are not
            compared.
        model_key: what the model's names stand below; empty for none.
        optimizer_key: what the optimizer's stand below.
        process_group: the default one if not given.

    Raises:
        CheckpointError: on all ranks alike: the directory holds a checkpoint already, copies differ, state on
            the meta device, an optimizer with parameters of no stage, or writing failed.
        UsageError: ``stages`` is something else, such as a schedule.

    >>> import tempfile
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 2)
    >>> save_checkpoint(folder, model, extra={"step": 3})
    >>> load_checkpoint(folder, torch.nn.Linear(2, 2)).extra
    {'step': 3}
    """
    savers = savers_of(stages, process_group)
    values, problem = _attempt(lambda: _entries(path, stages, optimizers, model_key, optimizer_key))
    for rank, text in enumerate(savers.everywhere(problem)):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}" if savers.named else text)
    entries = [*values, *(_extra_entries(extra or {}) if savers.first else ())]
    shares = share_out(entries, savers.rank, savers.everywhere, replicas)
    try:
        savers.write(_nested(entries, set(shares.mine)), AliasedWriter(path, shares.aliases))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)!r} could not be written: {reason(error)}"
        ) from error


def _nested(entries: Sequence[Entry], mine: set[str]) -> dict[str, Any]:
    """What this rank writes, in sections."""
    nested: dict[str, Any] = {}
    for entry in entries:
        if entry.key in mine:
            section = nested.setdefault(entry.section, {}) if entry.section else nested
            value = entry.value
            section.setdefault(entry.name, value.detach() if isinstance(value, Tensor) else value)
    return nested


def _attempt(action: Callable[[], list[Entry]]) -> tuple[list[Entry], str | None]:
    """What ``action`` returns, or what went wrong: told to all ranks before any of them waits for another."""
    try:
        return action(), None
    except CheckpointError as error:
        return [], str(error)


def _entries(
    path: str | os.PathLike[str],
    stages: Stages,
    optimizers: Optimizers | None,
    model_key: str,
    optimizer_key: str,
) -> list[Entry]:
    """All that this rank holds, under the names of the checkpoint."""
    if (Path(path) / ".metadata").exists():
        raise CheckpointError(
            f"{os.fspath(path)!r} holds a checkpoint already: save to another directory, or remove it first"
        )
    states = [by_identity(held_state(module)) for module in stage_modules(stages)]
    entries = []
    for held in (held for state in states for held in state):
        if isinstance(held.value, Tensor) and not has_memory(held.value):
            raise CheckpointError(
                f"{held.names[0]!r} is on the meta device: materialise the stage before saving"
            )
        entries += [Entry(model_key, name, held.value, min(held.names)) for name in held.names]
    entries += optimizer_entries(_listed(optimizers), _names(states), optimizer_key)
    return entries


def _extra_entries(extra: Mapping[str, Any]) -> list[Entry]:
    """Each value as bytes, so that nothing looks into it."""
    entries = []
    for name, value in extra.items():
        buffer = BytesIO()
        torch.save(value, buffer)
        entries.append(Entry(EXTRA, name, buffer.getvalue(), name))
    return entries


def load_checkpoint(
    path: str | os.PathLike[str],
    stages: Stages,
    optimizers: Optimizers | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> Restored:
    """Read this rank's stages, and nothing else, from a checkpoint of any cut.

    Not collective: each rank reads for itself. Values are read into the tensors that are there, so ties and
    optimizers stay as they are. Load into the stage before it is wrapped, or after; both work.

    Args:
        path: the directory.
        stages: this rank's stages, or a whole model.
        optimizers: of these stages: they get exactly the state that was saved.
        strict: a parameter or buffer that the checkpoint does not have is an error.
        cast: convert tensors of another dtype; otherwise they are an error.
        model_key: what the model's names stand below in the checkpoint; empty for none.
        optimizer_key: what the optimizer's stand below.

    Raises:
        CheckpointError: names that are missing, another shape or dtype (both are shown), state on the meta
            device, one param group of parameters with different settings, or a directory that can't be read.
    """
    modules = stage_modules(stages)
    source = CheckpointSource(os.fspath(path))
    states = [by_identity(held_state(module)) for module in modules]
    wanted, missing = source.find([held for state in states for held in state], model_key, cast=cast)
    if missing and strict:
        raise CheckpointError(source.message(missing, model_key))
    for part in wanted:
        source.read(part)
    for module, state in zip(modules, states, strict=True):
        if opaque := source.opaque(state, model_key):
            module.load_state_dict(opaque, strict=False)
    names = _names(states)
    for optimizer in _listed(optimizers):
        _restore(optimizer, names, source, optimizer_key, strict=strict)
    return Restored(tuple(missing), source.extra())


def _restore(optimizer: Optimizer, names: Names, source: CheckpointSource, key: str, *, strict: bool) -> None:
    parameters = {names_of(p, names)[0]: p for group in optimizer.param_groups for p in group["params"]}
    tensors = {alias: p for p in parameters.values() for alias in names[id(p)]}
    settings = source.settings(key, tensors)
    missing = [name for name, p in parameters.items() if not settings.keys() & {*names[id(p)]}]
    if missing and strict:
        raise CheckpointError(
            f"the checkpoint {source.path!r} has no optimizer state for {listed(missing)}: pass the "
            f"optimizers when saving, name the key that they are below (optimizer_key is {key!r}), or load "
            "with strict=False"
        )
    restore_optimizer(optimizer, names, source.values(f"{key}.state", tensors), settings)


def _names(states: Sequence[Sequence[Held]]) -> dict[int, tuple[str, ...]]:
    """All names of each tensor, by its identity. A parameter that two stages hold may have a name more in
    one.
    """
    found: dict[int, dict[str, None]] = {}
    for held in (held for state in states for held in state):
        found.setdefault(id(held.value), {}).update(dict.fromkeys(held.names))
    return {identity: tuple(names) for identity, names in found.items()}


def _listed(optimizers: Optimizers | None) -> list[Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
