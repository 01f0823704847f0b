"""Two pipelines of two stages, side by side: four processes, each data parallel with one other.

::

                 stage 0    stage 1
    pipeline 0   rank 0 --- rank 1
                   |          |
    pipeline 1   rank 2 --- rank 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.pipelining.models import Case
from tests.pipelining.running import keyed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from partita.ddp import replicate
from partita.pipelining import Pipe, UncutReference, pipeline
from partita.pipelining.stages import Stage
from partita.pipelining.training import LossWeights
from partita.runtime import ProcessGroupComm

SAMPLES = 16
"""In a batch; each of the two pipelines takes half."""

MICROBATCHES = 4

PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "float16": partial(torch.autocast, "cpu", torch.float16),
}


@dataclass(frozen=True)
class Place:
    """Where this process stands."""

    pipeline: int
    stage: int
    replicas: DeviceMesh
    comm: ProcessGroupComm


def place() -> Place:
    """Of this process in a world of four. Collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    comm = ProcessGroupComm.from_group(mesh["pp"].get_group())
    return Place(mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank(), mesh["dp"], comm)


def cut(case: Case) -> Pipe:
    """The case's model in two stages, cut for the microbatches of half a batch."""
    args, kwargs, _ = case.data(SAMPLES // 2 // MICROBATCHES)
    return pipeline(case.model(), args, kwargs, split_spec=case.split_spec(2))


def data(case: Case, seed: int, pipeline: int | None) -> tuple[tuple[Any, ...], Tensor]:
    """The whole batch, or one pipeline's half of it."""
    args, _, target = case.data(SAMPLES, seed)
    if pipeline is None:
        return args, target
    half = slice(pipeline * SAMPLES // 2, (pipeline + 1) * SAMPLES // 2)
    return tuple(arg[half] for arg in args), target[half]


def wrap(stage: Stage, how: str, replicas: DeviceMesh) -> None:
    """Make a stage data parallel: ``ddp``, with an option of it after a blank, ``replicate``, or ``fsdp``."""
    kind, _, option = how.partition(" ")
    if kind == "ddp":
        options = {option: True} if option else {}
        stage.module = DistributedDataParallel(stage.module, process_group=replicas.get_group(), **options)
    elif kind == "replicate":
        stage.module = replicate(stage.module, replicas.get_group())
    else:
        fully_shard(stage.module, mesh=replicas)


def full(tensor: Tensor | None) -> Tensor | None:
    """All of a sharded tensor. Collective where it is one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(module: nn.Module) -> nn.Module:
    """What is in the wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in plain(module).named_parameters(remove_duplicate=False):
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(value.grad) for name, value in _named(module)}


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(value.detach()) for name, value in _named(module)}


def uncut(case: Case, train: Callable[[UncutReference, nn.Module], Any]) -> Any:
    """Runs ``train`` with the uncut model over both pipelines' microbatches."""
    whole = keyed(case, SAMPLES // 2 // MICROBATCHES)
    return train(UncutReference(whole, 2 * MICROBATCHES, case.loss), whole)


class Halves:
    """The uncut model over each pipeline's half of a batch, with that pipeline's number for a seed.

    The mean of the two gradients is what two data parallel pipelines should end with, bit for bit: to halve
    is exact, and a sum of two numbers has one order only.
    """

    def __init__(self, case: Case) -> None:
        self.whole = keyed(case, SAMPLES // 2 // MICROBATCHES)
        self._runners = [UncutReference(self.whole, MICROBATCHES, case.loss, seed=seed) for seed in range(2)]

    def step(
        self, halves: Sequence[tuple[tuple[Any, ...], Tensor]], scale: float = 1.0
    ) -> list[list[Tensor]]:
        """Leaves the mean gradient, times ``scale``, in ``.grad``. Returns the losses, by pipeline."""
        weights = LossWeights((scale / MICROBATCHES,) * MICROBATCHES, total=None)
        found: list[list[Tensor]] = []
        means: dict[str, Tensor] = {}
        for runner, (args, target) in zip(self._runners, halves, strict=True):
            losses: list[Tensor] = []
            self.whole.zero_grad()
            runner.step(*args, target=target, losses=losses, loss_weights=weights)
            found.append(losses)
            for name, value in self.whole.named_parameters():
                assert value.grad is not None, name
                means[name] = means[name] + value.grad / 2 if name in means else value.grad / 2
        for name, value in self.whole.named_parameters():
            value.grad = means[name]
        return found
