"""What each rank will write, agreed on by all ranks before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from partita._torch.tensors.storage import has_memory
from partita.errors import ArgumentError, CheckpointError
from partita.pipelining.checkpoints.contents.checkpoint_source import EXTRA
from partita.pipelining.checkpoints.contents.extra_state import as_read, as_stored
from partita.pipelining.checkpoints.contents.optimizer_state import optimizer_entries
from partita.pipelining.checkpoints.contents.replicas import Replicas, StateEntry, share_out
from partita.pipelining.checkpoints.contents.wrapped_tensors import (
    WRAPPER,
    description,
    is_wrapper,
    parts_of,
)
from partita.pipelining.checkpoints.files.manifest import MANIFEST, UNFINISHED
from partita.pipelining.checkpoints.files.manifest_writer import METADATA
from partita.pipelining.checkpoints.files.plain_values import check_plain, plain_bytes
from partita.pipelining.checkpoints.together.savers import Savers, agree, attempt
from partita.pipelining.stages.placing.state_of_stage import (
    Stages,
    StateValue,
    by_identity,
    is_opaque,
    listed_stages,
    stage_modules,
    state_of_stage,
)
from partita.pipelining.stages.stage import Stage

__all__ = ["Optimizers", "Prepared", "Request", "all_names", "listed_optimizers", "prepare", "refuse_second"]

Optimizers = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True)
class Request:
    """What is to be saved; see `save_checkpoint`."""

    stages: Stages
    optimizers: Optimizers | None
    extra: Mapping[str, Any]
    replicas: Replicas
    model_key: str
    optimizer_key: str
    allow_pickle: bool


@dataclass(frozen=True)
class Prepared:
    """What this rank writes.

    Attributes:
        values: by section and name.
        aliases: from a name to the one whose bytes it shares; the same on every rank.
        steps: how many steps the schedule has made; None where no rank has a stage.
    """

    values: dict[str, Any]
    aliases: Mapping[str, str]
    steps: int | None


def prepare(request: Request, path: Path, savers: Savers) -> Prepared:
    """Collect what this rank has, and share out who writes what. Collective.

    Args:
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: on all ranks alike.
    """
    entries, problem = attempt(lambda: _entries(request, first=savers.first), path, "written")
    agree(savers, problem)
    assert entries is not None
    steps = _same_steps(savers, request.stages)
    shares = share_out(entries, savers.rank, savers.gather, request.replicas)
    return Prepared(_nested(entries, set(shares.mine)), shares.aliases, steps)


def refuse_second(path: Path, *, first: bool) -> None:
    """Raise an error where the directory holds a checkpoint. One that was not finished is removed, by the
    first rank.
    """
    is_unfinished = (path / UNFINISHED).exists() and not (path / MANIFEST).exists()
    if is_unfinished and first:
        (path / METADATA).unlink(missing_ok=True)
    if not is_unfinished and any((path / name).exists() for name in (METADATA, MANIFEST)):
        raise CheckpointError(
            f"{os.fspath(path)!r} holds a checkpoint already: save to another directory, or remove it first"
        )


def _same_steps(savers: Savers, stages: Stages) -> int | None:
    own = {stage.step_count.steps for stage in listed_stages(stages) if isinstance(stage, Stage)}
    everywhere = savers.gather(sorted(own))
    first: tuple[int, int] | None = None
    for rank, steps in ((rank, steps) for rank, counts in enumerate(everywhere) for steps in counts):
        if first is None:
            first = rank, steps
        elif steps != first[1]:
            raise CheckpointError(
                f"the schedule of rank {first[0]} has made {first[1]} steps, and that of rank {rank} "
                f"{steps}: save where all ranks have made the same, since random numbers depend on it"
            )
    return None if first is None else first[1]


def _entries(request: Request, *, first: bool) -> list[StateEntry]:
    """All that this rank could write; ``extra`` on the first."""
    states = [by_identity(state_of_stage(module)) for module in stage_modules(request.stages)]
    entries = []
    for state_value in chain.from_iterable(states):
        if isinstance(state_value.value, Tensor) and not has_memory(state_value.value):
            raise CheckpointError(
                f"{state_value.names[0]!r} is on the meta device: materialise the stage before saving"
            )
        if is_opaque(state_value):
            values = [StateValue(as_stored(state_value.value), state_value.names)]
        else:
            values = list(parts_of(state_value))
            if is_wrapper(state_value.value):
                names = tuple(f"{name}.{WRAPPER}" for name in state_value.names)
                values.append(StateValue(description(state_value.value), names))
        entries += [
            StateEntry(request.model_key, name, value.value, min(value.names))
            for value in values
            for name in value.names
        ]
    entries += optimizer_entries(
        listed_optimizers(request.optimizers),
        all_names(states),
        request.optimizer_key,
        allow_pickle=request.allow_pickle,
    )
    for entry in entries:
        if not isinstance(entry.value, Tensor) and not request.allow_pickle:
            check_plain(as_read(entry.value), repr(entry.key))
    for name, value in request.extra.items() if first else ():
        text = plain_bytes(value, f"extra[{name!r}]", allow_pickle=request.allow_pickle)
        entries.append(StateEntry(EXTRA, name, text, name))  # as bytes, so that torch does not flatten it
    return entries


def _nested(entries: Sequence[StateEntry], mine: set[str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for entry in entries:
        if entry.key in mine:
            section = nested.setdefault(entry.section, {}) if entry.section else nested
            value = entry.value
            section.setdefault(entry.name, value.detach() if isinstance(value, Tensor) else value)
    return nested


def all_names(states: Sequence[Sequence[StateValue]]) -> dict[int, tuple[str, ...]]:
    """All names of each tensor, by its identity: one that two stages hold may have more names in one."""
    names_of: dict[int, dict[str, None]] = {}
    for entry in chain.from_iterable(states):
        names_of.setdefault(id(entry.value), {}).update(dict.fromkeys(entry.names))
    return {identity: tuple(names) for identity, names in names_of.items()}


def listed_optimizers(optimizers: Optimizers | None) -> list[Optimizer]:
    """A list of the optimizers.

    Raises:
        ArgumentError: something else, such as the state of one.
    """
    if optimizers is None:
        return []
    listed: list[Any] = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
    for value in listed:
        if not hasattr(value, "param_groups"):
            raise ArgumentError(
                f"optimizers holds a {type(value).__name__}: give optimizers themselves, one or a list, and "
                "not what their state_dict() returned"
            )
    return listed
