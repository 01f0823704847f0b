"""A trial of an optimizer on small tensors: does its step of one parameter depend on the others?

The optimizer is copied, with its options, over small parameters. Two copies take the same steps, with other
values and gradients in every second of these::

    a b c d  ->  a' b' c' d'
    a x c y  ->  a' x' c' y'      a' and c' are equal where each parameter is looked at alone

None is left out, as optimizers have lists beside that of the parameters (``param_names``).

The sizes of gradients change from step to step by powers of ten, so that a norm of all of them shows.

Beside ``step`` each other method that is a part of one is tried by itself (``first_step`` of SAM, which moves
weights to where the next gradients are computed). A step that wants a closure gets one, which computes
gradients.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from partita._torch.compile.eager_stance import nothing_compiled
from partita._torch.operators.collectives import before_collectives
from partita._torch.operators.draws import before_draws
from partita.pipelining.stages.optimizer_steps import stepped_by
from partita.runtime.host_generators import generator_states, set_generators

__all__ = ["looks_at_others"]

_STEPS = 4
_LEAST_RATE = 0.01
"""The learning rate of a trial is this at least: warm-up begins with zero."""
_LEAST_DECAY = 0.5
"""The weight decay of a trial, where there is one: some know the other parameters in that alone."""
_LARGEST_DIMENSION = 4


_Way = Callable[[Any, Callable[[], Any]], object]
"""Calls an optimizer, with a closure that computes the gradients anew."""


class _CannotTell(Exception):
    """The optimizer draws random numbers, or calls other ranks."""


def looks_at_others(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step of a parameter depends on which other parameters it has. False, too, where
    that can't be tried: it draws from torch, calls other ranks, or can't be copied.

    The optimizer, its parameters and the random generators stay as they are.
    """
    parameters = stepped_by(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    generators = generator_states()
    try:
        for parameter in parameters:  # a step that reaches for them by another way finds nothing to do
            parameter.grad = None
        alone, with_closure, *parts = [_looks(optimizer, way) for way in _ways(type(optimizer))]
        return any([with_closure if alone is None else alone, *parts])
    finally:
        set_generators(generators)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _ways(kind: type[Optimizer]) -> Iterator[_Way]:
    """``step()``, ``step(closure)``, and each public method that is named like a part of a step."""
    yield lambda trial, _: kind.step(trial)
    yield lambda trial, closure: kind.step(trial, closure)
    for name in sorted(set(dir(kind)) - set(dir(Optimizer))):
        if name.endswith("_step") and not name.startswith("_"):
            yield _part(name)


def _part(name: str) -> _Way:
    return lambda trial, _: getattr(trial, name)()


def _looks(optimizer: Optimizer, way: _Way) -> bool | None:
    """Whether this way of calling the optimizer does; None where it can't be tried."""
    generators = generator_states()
    try:
        start, ends = _trial(optimizer, way)
        set_generators(generators)
        _, others_ends = _trial(optimizer, way, others=1)
    except Exception:  # whatever somebody's optimizer raises on tensors that it was not made for
        return None
    return any(map(_differ, start[::2], ends[::2], others_ends[::2]))


def _differ(start: Tensor, here: Tensor, there: Tensor) -> bool:
    """Whether two results are apart by more than roundings."""
    roundings = 1e-3 * (here - start).abs().max() + 1e-5 * start.abs().max()
    return bool((here - there).abs().max() > roundings)


def _trial(optimizer: Optimizer, way: _Way, *, others: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """The values of a copy's parameters, before its steps and after them.

    Args:
        others: 1: every second parameter has other values and gradients.
    """
    trial = _copy(optimizer)
    chosen: list[nn.Parameter] = []
    for group in trial.param_groups:
        group["params"] = _two_of_each_kind(group["params"])
        chosen += group["params"]
        if isinstance(group.get("lr"), float):
            group["lr"] = max(group["lr"], _LEAST_RATE)
        if group.get("weight_decay") and isinstance(group["weight_decay"], float):
            group["weight_decay"] = max(group["weight_decay"], _LEAST_DECAY)
    seeds = [number + number % 2 * others * _STEPS * len(chosen) for number in range(len(chosen))]
    for seed, parameter in zip(seeds, chosen, strict=True):
        parameter.data.copy_(_numbers(parameter, seed))
    start = [parameter.detach().clone() for parameter in chosen]

    for step in range(_STEPS):
        gradients = []
        for number, (seed, parameter) in enumerate(zip(seeds, chosen, strict=True)):
            size = 10.0 ** ((number + step + number % 2 * others) % _STEPS - 2)
            gradients.append(_numbers(parameter, (1 + step) * len(chosen) + seed) * size)
        compute = partial(_set_gradients, chosen, gradients)
        compute()
        with (
            warnings.catch_warnings(action="ignore"),
            nothing_compiled(),
            before_draws(_refuse),
            before_collectives(_refuse),
        ):
            way(trial, compute)
    return start, [parameter.detach().clone() for parameter in chosen]


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Tensor:
    """Gradients that follow from the values of the parameters, each from its own. Returns a loss,
    which is not zero: some make steps in proportion to it.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * (1 + parameter.detach())
    return torch.ones(())


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
