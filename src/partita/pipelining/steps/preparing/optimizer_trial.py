"""A trial of an optimizer on small tensors: does its step of one parameter depend on the others?

The optimizer is copied, with its options, over small parameters. Two copies take the same steps, one with all
of these and one with every second of them::

    with all             a b c d  ->  a' b' c' d'
    every second one     a   c    ->  a'    c'      equal where each parameter is looked at alone

The sizes of gradients change from step to step by powers of ten, so that a norm of all of them shows.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from partita._torch.compile.eager_stance import nothing_compiled
from partita._torch.operators.collectives import before_collectives
from partita._torch.operators.draws import before_draws
from partita.runtime.host_generators import generator_states, set_generators

__all__ = ["looks_at_others"]

_STEPS = 4
_LEAST_RATE = 0.01
"""The learning rate of a trial is this at least: warm-up begins with zero."""
_LEAST_DECAY = 0.5
"""The weight decay of a trial, where there is one: some know the other parameters in that alone."""
_LARGEST_DIMENSION = 4


class _CannotTell(Exception):
    """The optimizer draws random numbers, or calls other ranks."""


def looks_at_others(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step of a parameter depends on which other parameters it has. False, too, where
    that can't be tried: it needs a closure, draws from torch, calls other ranks, or can't be copied.

    The optimizer, its parameters and the random generators stay as they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    generators = generator_states()
    try:
        for parameter in parameters:  # a step that reaches for them by another way finds nothing to do
            parameter.grad = None
        start, together = _trial(optimizer, every=1)
        set_generators(generators)
        _, apart = _trial(optimizer, every=2)
    except Exception:  # whatever somebody's optimizer raises on tensors that it was not made for
        return False
    finally:
        set_generators(generators)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return any(
        _differ(start[place], together[place], value) for place, value in apart.items() if place in together
    )


def _differ(start: Tensor, here: Tensor, there: Tensor) -> bool:
    """Whether two results are apart by more than roundings."""
    roundings = 1e-3 * (here - start).abs().max() + 1e-5 * start.abs().max()
    return bool((here - there).abs().max() > roundings)


def _trial(optimizer: Optimizer, *, every: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The values of a copy's parameters by number, before its steps and after them.

    Args:
        every: 2: the copy has every second parameter; 1: all.
    """
    trial = _copy(optimizer)
    chosen: dict[int, nn.Parameter] = {}
    count = 0
    for group in trial.param_groups:
        small = _two_of_each_kind(group["params"])
        numbered = dict(enumerate(small, count))
        count += len(small)
        group["params"] = [parameter for number, parameter in numbered.items() if number % every == 0]
        chosen |= {number: it for number, it in numbered.items() if number % every == 0}
        if isinstance(group.get("lr"), float):
            group["lr"] = max(group["lr"], _LEAST_RATE)
        if group.get("weight_decay") and isinstance(group["weight_decay"], float):
            group["weight_decay"] = max(group["weight_decay"], _LEAST_DECAY)
    for number, parameter in chosen.items():
        parameter.data.copy_(_numbers(parameter, number))
    start = {number: parameter.detach().clone() for number, parameter in chosen.items()}
    for step in range(_STEPS):
        for number, parameter in chosen.items():
            size = 10.0 ** ((number + step) % _STEPS - 2)
            parameter.grad = _numbers(parameter, (1 + step) * count + number) * size
        with (
            warnings.catch_warnings(action="ignore"),
            nothing_compiled(),
            before_draws(_refuse),
            before_collectives(_refuse),
        ):
            type(trial).step(trial)
    return start, {number: parameter.detach().clone() for number, parameter in chosen.items()}


def _copy(optimizer: Optimizer) -> Optimizer:
    """The optimizer as it is before its first step, without hooks, for parameters of its own."""
    trial: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): trial, id(optimizer.state): defaultdict(dict)}
    for group in optimizer.param_groups:
        memo |= {id(parameter): _small(parameter) for parameter in group["params"]}
    torchs_own = {*vars(SGD([torch.zeros(1)])), "step"}  # a scheduler puts its own step there
    own = {name: value for name, value in vars(optimizer).items() if name not in torchs_own}
    trial.__setstate__(copy.deepcopy({**Optimizer.__getstate__(optimizer), **own}, memo))
    return trial


def _small(parameter: Tensor) -> nn.Parameter:
    shape = [min(max(size, 1), _LARGEST_DIMENSION) for size in parameter.shape]
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    small.__dict__.update(vars(parameter))
    return small


def _two_of_each_kind(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Two parameters for each number of dimensions, one of which is made where there is no second."""
    kinds: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.dim()].append(parameter)
    return [
        parameter
        for kind in kinds.values()
        for parameter in (kind[0], kind[1] if len(kind) > 1 else copy.deepcopy(kind[0]))
    ]


def _numbers(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like)


def _refuse(operator: str) -> NoReturn:
    raise _CannotTell(operator)
