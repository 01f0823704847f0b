"""Training that stops, is saved, and goes on in another cut."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tests.pipelining.models import TRANSFORMER, Case
from tests.pipelining.running import cut, keyed
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.pipelining import Pipe, Schedule1F1B, UncutReference
from partita.runtime import Comm, InProcessWorld

CASE = TRANSFORMER
MICROBATCHES = 4

Trained = tuple[list[Any], list[Optimizer]]
"""Stages (or one whole model), and an optimizer for each."""


@lru_cache(maxsize=4)
def pipe_of(stages: int, case: Case = CASE) -> Pipe:
    """Shared by tests: copy it before training."""
    return cut(case, stages)


def optimizer_for(module: nn.Module) -> Optimizer:
    """Two groups with settings of their own, chosen by what a parameter is and not by where."""
    flat = [p for p in module.parameters() if p.dim() < 2]
    deep = [p for p in module.parameters() if p.dim() >= 2]
    return torch.optim.AdamW([{"params": flat, "lr": 0.02, "weight_decay": 0.0}, {"params": deep}], lr=0.05)


def advance(runner: Any, optimizer: Optimizer, first: int, steps: int) -> None:
    """Some optimizer steps; ``runner`` is told which step comes first, as its random numbers depend on it."""
    runner.load_state_dict({"steps": first})
    for step in range(first, first + steps):
        args, kwargs, target = CASE.data(8, seed=10 + step)
        runner.step(*args, target=target, **kwargs)
        optimizer.step()
        optimizer.zero_grad()


def stages_of(number: int, *, seed: int | None = None) -> Trained:
    """A cut, each stage in a copy of its own as on ranks; with random values where a seed is given."""
    stages = [copy.deepcopy(pipe_of(number)).build_stage(index) for index in range(number)]
    modules = modules_of(stages)
    if seed is not None:
        scramble(modules, seed)
    return stages, [optimizer_for(module) for module in modules]


def modules_of(stages: Sequence[Any]) -> list[nn.Module]:
    """Their modules; a whole model is its own."""
    return [stage if isinstance(stage, nn.Module) else stage.module for stage in stages]


def whole(*, seed: int | None = None) -> Trained:
    """The uncut model, as a graph that draws the same random numbers."""
    model = keyed(CASE)
    if seed is not None:
        scramble([model], seed)
    return [model], [optimizer_for(model)]


def scramble(modules: Sequence[nn.Module], seed: int) -> None:
    """Other values in every persistent tensor."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in (tensor for module in modules for tensor in module.state_dict().values()):
            tensor.copy_(torch.randint(5, tensor.shape))


def train_stages(trained: Trained, first: int, steps: int) -> None:
    """Run a pipeline, a rank a stage, on stages that `stages_of` made."""
    stages, optimizers = trained

    def body(comm: Comm) -> None:
        stage = stages[comm.rank]
        stage.comm = comm
        advance(Schedule1F1B(stage, MICROBATCHES, CASE.loss), optimizers[comm.rank], first, steps)

    InProcessWorld(len(stages)).run(body)


def train_whole(trained: Trained, first: int, steps: int) -> None:
    """Run the uncut model."""
    (model,), (optimizer,) = trained
    advance(UncutReference(model, MICROBATCHES, CASE.loss), optimizer, first, steps)


def state_of(stages: Sequence[Any]) -> dict[str, Tensor]:
    """All names and values together; copies must be equal."""
    parameters: dict[str, Tensor] = {}
    for module in modules_of(stages):
        for name, value in module.state_dict().items():
            assert torch.equal(parameters.setdefault(name, value.clone()), value), name
    return parameters
