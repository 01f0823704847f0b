"""The parameters and buffers of stages, under the names of the model that they were cut from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from partita._torch.fake.undetached_state import tensors_in_state_dict
from partita.errors import ArgumentError, ScheduleError
from partita.pipelining.stages.stage import Stage

__all__ = [
    "EXTRA_STATE",
    "Stages",
    "StateValue",
    "by_identity",
    "clean_name",
    "is_opaque",
    "listed_stages",
    "stage_modules",
    "stages_to_run",
    "state_of_stage",
]

Stages = Stage | nn.Module | Sequence[Stage | nn.Module]
"""Stages, or whole models: one or several."""

EXTRA_STATE = "_extra_state"
"""The last part of the name that torch gives to what a module's ``get_extra_state`` returns."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What ``torch.compile`` and torch's activation checkpointing put into names."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """One value with all of its names, in the order of the state dict; several where it is tied."""

    value: Any
    names: tuple[str, ...]


def is_opaque(state_value: StateValue) -> bool:
    """Whether it is what a module's ``get_extra_state`` returned, which only ``set_extra_state`` can take."""
    return state_value.names[0].rpartition(".")[2] == EXTRA_STATE or not isinstance(state_value.value, Tensor)


def listed_stages(stages: Stages) -> list[Stage | nn.Module]:
    """A list of the stages.

    Raises:
        ArgumentError: something else, such as a schedule.
    """
    alone = isinstance(stages, (Stage, nn.Module)) or not isinstance(stages, Sequence)
    as_list: list[Any] = [stages] if alone else list(stages)  # type: ignore[arg-type]
    for value in as_list:
        if not isinstance(value, (Stage, nn.Module)):
            raise ArgumentError(
                f"stages holds a {type(value).__name__}: give what pipe.build_stage() returned, a list of "
                "such stages, or a whole model"
            )
    return as_list


def stages_to_run(stages: Stage | Sequence[Stage]) -> list[Stage]:
    """A list of the stages that a schedule is made of.

    Raises:
        ArgumentError: something else, such as a pipe or a stage's module.
        ScheduleError: there is none.
    """
    as_list: list[Any] = list(stages) if isinstance(stages, (list, tuple)) else [stages]
    for value in as_list:
        if not isinstance(value, Stage):
            raise ArgumentError(
                f"a schedule runs stages, and this is a {type(value).__name__}: give what pipe.build_stage() "
                "or partita.pipelining.build_stage() returned, a partita.pipelining.PipelineStage, or a list "
                "of them"
            )
    if not as_list:
        raise ScheduleError("a rank needs at least one stage: pass the stage that it built")
    return as_list


def stage_modules(stages: Stages) -> list[nn.Module]:
    """The modules themselves, without what the user wrapped around them (DDP, ``torch.compile``).

    Raises:
        ArgumentError: as `listed_stages`.
    """
    as_list = listed_stages(stages)
    return [_unwrapped(stage.module if isinstance(stage, Stage) else stage) for stage in as_list]


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        inner = (
            module.module
            if isinstance(module, DistributedDataParallel)
            else getattr(module, "_orig_mod", None)
        )
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def state_of_stage(module: nn.Module) -> dict[str, Any]:
    """The module's state dict, with the tensors themselves (not detached) under the model's own names."""
    return {clean_name(name): value for name, value in tensors_in_state_dict(module).items()}


def clean_name(name: str) -> str:
    """A name without what the user's wrappers have put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def by_identity(state: Mapping[str, Any]) -> list[StateValue]:
    """The values of a state dict, each tensor once with all of its names; extra state is each module's own.

    >>> layer = nn.Linear(2, 2)
    >>> tied = nn.ModuleDict({"a": layer, "b": layer})
    >>> [entry.names for entry in by_identity(state_of_stage(tied))]
    [('a.weight', 'b.weight'), ('a.bias', 'b.bias')]
    """
    groups: dict[object, list[str]] = {}
    values: dict[object, Any] = {}
    for name, value in state.items():
        is_extra = name.rpartition(".")[2] == EXTRA_STATE
        identity = id(value) if isinstance(value, Tensor) and not is_extra else name
        groups.setdefault(identity, []).append(name)
        values[identity] = value
    return [StateValue(values[identity], tuple(names)) for identity, names in groups.items()]
