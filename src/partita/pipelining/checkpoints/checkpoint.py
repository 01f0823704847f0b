"""Checkpoints that do not know how the model was cut: written by any number of stages, read by any other
number, or by the uncut model.

They are ordinary ``torch.distributed.checkpoint`` directories. Every tensor is under the name that it has in
the model that was never cut, in the layout of ``dcp.save({"model": model.state_dict(), "optim": ...})``, so
what torch saved is read here, and the other way round. Beside lies a list of all files with their checksums
(`manifest`), which is written last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from partita.errors import CheckpointError, ExecutionError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.all_or_nothing import put, unchanged_on_error
from partita.pipelining.checkpoints.contents.checkpoint_source import CheckpointSource, Incoming
from partita.pipelining.checkpoints.contents.optimizer_state import (
    Names,
    Restore,
    names_of,
    prepare_optimizer,
)
from partita.pipelining.checkpoints.contents.own_state import LoadableState, loadable_state
from partita.pipelining.checkpoints.contents.prepare import (
    Optimizers,
    Request,
    all_names,
    listed_optimizers,
    prepare,
    refuse_second,
)
from partita.pipelining.checkpoints.contents.replicas import Replicas
from partita.pipelining.checkpoints.files.manifest_writer import ManifestWriter
from partita.pipelining.checkpoints.together.savers import Savers, agree, attempt, savers_of
from partita.pipelining.checkpoints.together.shared_folder import check_shared
from partita.pipelining.checkpoints.together.torch_messages import reason
from partita.pipelining.stages.placing.state_of_stage import (
    Stages,
    listed_stages,
    stage_modules,
)
from partita.pipelining.stages.stage import Stage

__all__ = ["Restored", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True)
class Restored:
    """What `load_checkpoint` returns.

    Attributes:
        missing: names of parameters and buffers that the checkpoint does not have (with ``strict=False``).
        extra: what `save_checkpoint` was given as ``extra``.
        steps: how many steps the schedule had made, where those of the loaded stages continue; None where the
            checkpoint has no stages, but a whole model.
    """

    missing: tuple[str, ...]
    extra: Mapping[str, Any]
    steps: int | None = None


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
    allow_pickle: bool = False,
) -> None:
    """Write the state of all ranks' stages into one checkpoint, and how many steps their schedule has made,
    on which dropout depends.

    Where ``torch.distributed`` is initialised this is collective over ``process_group``, whose ranks together
    hold the model (copies of it are fine: each name is written once, by one of its holders). In an
    `InProcessWorld` it is collective over its ranks. Otherwise this process holds all stages.

    Args:
        path: a directory that all ranks can write to; made if it is not there.
        stages: this rank's stages, or a whole model.
        optimizers: of these stages.
        extra: plain values and tensors to keep beside, by name; rank 0's are kept. The ``state_dict()`` of a
            learning rate's scheduler belongs here.
        replicas: copies of one name (tied parameters, data parallel ranks) that differ by any bit are an
            error with ``equal``; with ``first`` the lowest rank's copy is written. Sharded tensors are not
            compared.
        model_key: the prefix of the model's names; empty for none.
        optimizer_key: the prefix of the optimizer's.
        process_group: the default one if not given.
        allow_pickle: pickle what is no plain data (in ``extra``, a module's extra state, an optimizer).
            Loading it runs code, and needs ``allow_pickle=True`` too.

    Raises:
        CheckpointError: on all ranks alike: the directory holds a checkpoint already, or is not the same one
            for all ranks; copies differ, values are no plain data, state is on the meta device, an
            optimizer has parameters of no stage; or writing failed.
        PeerFailed: another rank failed or died meanwhile.
        ArgumentError: ``stages`` is something else, such as a schedule.

    >>> import tempfile, torch
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 2)
    >>> save_checkpoint(folder, model, extra={"step": 3})
    >>> load_checkpoint(folder, torch.nn.Linear(2, 2)).extra
    {'step': 3}
    """
    savers = savers_of(stages, process_group)
    request = Request(stages, optimizers, extra or {}, replicas, model_key, optimizer_key, allow_pickle)
    folder = Path(path)
    agree(savers, attempt(lambda: refuse_second(folder, first=savers.first), folder, "written")[1])
    prepared = prepare(request, folder, savers)
    check_shared(folder, savers)
    try:
        savers.write(prepared.values, ManifestWriter(path, prepared.aliases, steps=prepared.steps))
    except ExecutionError as error:  # of another rank, which it names
        error.add_note(f"(the checkpoint {os.fspath(path)!r} was not written)")
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)!r} could not be written: {reason(error)}"
        ) from error


def load_checkpoint(
    path: str | os.PathLike[str],
    stages: Stages,
    optimizers: Optimizers | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    model_key: str = "model",
    optimizer_key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    allow_pickle: bool = False,
) -> Restored:
    """Read this rank's stages, and nothing else, from a checkpoint of any cut. All or nothing: where it
    raises, on any rank, models, optimizers and random numbers are what they were on all.

    Collective as `save_checkpoint` is: the ranks compare what they are about to load, and each reads its own
    part. Values are copied into the tensors that are there, so ties and optimizers stay as they are. Load
    into the stage before it is wrapped, or after; both work. Schedules of the stages, made before or
    after, continue the step count of the schedule that was saved.

    What partita saved is compared with its checksums before it is used. During loading, the rank's part of
    the model is in memory twice, the second time on the CPU (sharded tensors: on their device).

    Args:
        path: the directory.
        stages: this rank's stages, or a whole model.
        optimizers: of these stages: they get exactly the state that was saved.
        strict: a parameter or buffer that the checkpoint does not have is an error.
        cast: convert tensors of another dtype, and optimizer state that has the dtype of its parameter;
            otherwise they are an error.
        model_key: the prefix of the model's names in the checkpoint; empty for none.
        optimizer_key: the prefix of the optimizer's.
        process_group: the default one if not given.
        alone: this process loads, and no other: nothing is compared.
        allow_pickle: unpickle what is no plain data, which runs whatever code it names.

    Raises:
        CheckpointError: on all ranks: a damaged file, a checkpoint that was not finished, ranks with
            different checkpoints, names that are missing, another shape or dtype (both are shown), state on
            the meta device, one param group of parameters with different settings, a pickle without
            ``allow_pickle``, or a directory that can't be read.
    """
    savers = savers_of(stages, process_group, alone=alone)
    modules = stage_modules(stages)
    every = listed_optimizers(optimizers)
    loaded, problem = attempt(
        lambda: _read(
            CheckpointSource(os.fspath(path), allow_pickle=allow_pickle),
            modules,
            every,
            (model_key, optimizer_key),
            strict=strict,
            cast=cast,
        ),
        path,
        "read",
    )
    agree(savers, problem)
    assert loaded is not None
    _compare(savers, loaded, path)
    with unchanged_on_error(loaded.states, every) as undo:
        put(loaded.tensors, undo)
        agree(savers, attempt(lambda: _load_own_state(loaded, strict=strict), path, "read")[1])
    if loaded.restored.steps is not None:
        for stage in listed_stages(stages):
            if isinstance(stage, Stage):
                stage.step_count.load(loaded.restored.steps)
    return loaded.restored


@dataclass(frozen=True)
class _ReadState:
    """What was read, before anything is changed.

    Attributes:
        tensors: the model's, each with its new value.
        states: of the modules, into which they are put.
        opaque: the extra state of each module.
        optimizers: functions that each load one optimizer's state.
    """

    identity: str
    tensors: Incoming
    states: tuple[LoadableState, ...]
    opaque: tuple[dict[str, Any], ...]
    optimizers: tuple[Restore, ...]
    restored: Restored


def _read(
    source: CheckpointSource,
    modules: Sequence[Any],
    optimizers: Sequence[Optimizer],
    keys: tuple[str, str],
    *,
    strict: bool,
    cast: bool,
) -> _ReadState:
    model_key, optimizer_key = keys
    loadable = tuple(loadable_state(module) for module in modules)
    states = [state.values for state in loadable]
    wanted, missing = source.find([entry for state in states for entry in state], model_key, cast=cast)
    if missing and strict:
        raise CheckpointError(source.message(missing, model_key))
    tensors = source.fetch(wanted)
    opaque = tuple(source.opaque(state, model_key) for state in states)
    names = all_names(states)
    prepared = tuple(
        _restore(optimizer, names, source, (model_key, optimizer_key), strict=strict)
        for optimizer in optimizers
    )
    restored = Restored(tuple(missing), source.extra(), source.steps)
    return _ReadState(source.identity, tensors, loadable, opaque, prepared, restored)


def _compare(savers: Savers, loaded: _ReadState, path: str | os.PathLike[str]) -> None:
    """Raise an error, on all ranks, where they have read different checkpoints."""
    identities = savers.gather((loaded.identity, os.fspath(path)))
    for rank, (identity, other) in enumerate(identities):
        if identity != identities[0][0]:
            raise CheckpointError(
                f"rank 0 loads the checkpoint {identities[0][1]!r} and rank {rank} another one, {other!r}: "
                "load the same on all ranks; latest_checkpoint gives the newest that is whole on all of them"
            )


def _load_own_state(loaded: _ReadState, *, strict: bool) -> None:
    """Load what only modules can, and optimizers, through their own ``load_state_dict``."""
    for state, opaque in zip(loaded.states, loaded.opaque, strict=True):
        state.put(opaque, missing=loaded.restored.missing, strict=strict)
    for restore in loaded.optimizers:
        restore()


def _restore(
    optimizer: Optimizer, names: Names, source: CheckpointSource, keys: tuple[str, str], *, strict: bool
) -> Restore:
    model_key, key = keys
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
    dtypes = {id(p): source.dtype(names[id(p)], model_key) for p in parameters.values()}
    states, shared = (source.values(f"{key}.{kind}", tensors) for kind in ("state", "shared_state"))
    return prepare_optimizer(
        optimizer, names, states, settings, shared, dtypes, allow_pickle=source.allow_pickle
    )
