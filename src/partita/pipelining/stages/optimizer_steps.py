"""Steps of the optimizers of this process: who is told of them, and which weights they step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partita.pipelining.stages.stage import Stage

__all__ = ["before_optimizers_step", "optimizers_calling", "stepped_by", "steps_any_of"]

_Watcher = TypeVar("_Watcher")
_watchers: WeakKeyDictionary[Any, list[Callable[[Any, Optimizer], None]]] = WeakKeyDictionary()


def before_optimizers_step(watcher: _Watcher, call: Callable[[_Watcher, Optimizer], None]) -> None:
    """Before each step of any optimizer of the process call ``call(watcher, optimizer)``, as long as the
    watcher lives, which this does not keep alive.
    """
    _listen()
    _watchers.setdefault(watcher, []).append(call)


@cache
def _listen() -> None:
    """Hook into torch, once and for good: it looks through its hooks while they run, and any of them may let
    Python look for garbage, so that a hook which went with its watcher would end the user's step.
    """
    register_optimizer_step_pre_hook(_tell_watchers)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell_watchers(optimizer: Optimizer, *_: Any) -> None:
    for watcher, calls in list(_watchers.items()):
        for call in calls:
            call(watcher, optimizer)


def optimizers_calling() -> list[Optimizer]:
    """The optimizers whose methods are under way, innermost first: where one steps another in a method of any
    name (``SAM.second_step``), torch tells of that other alone.

    Only frames of optimizers' methods are asked for their variables: before Python 3.13 whoever asks leaves a
    copy of them in the frame, and what a training loop then deletes stays in memory.
    """
    classes = _names_of_optimizers()
    calling: dict[int, Optimizer] = {}
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_qualname.rpartition(".")[0] in classes:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, Optimizer):
                calling.setdefault(id(owner), owner)
        frame = frame.f_back
    return list(calling.values())


def _names_of_optimizers() -> set[str]:
    """Those of all classes that an optimizer's method may come from."""
    kinds, names = [Optimizer], set[str]()
    while kinds:
        kind = kinds.pop()
        names.update(base.__qualname__ for base in kind.__mro__)
        kinds += kind.__subclasses__()
    return names


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, of all of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def steps_any_of(optimizer: Optimizer, stages: Iterable[Stage]) -> bool:
    """Whether an optimizer has any parameter of these stages."""
    stepped = set(map(id, stepped_by(optimizer)))
    return any(id(parameter) in stepped for stage in stages for parameter in stage.module.parameters())
