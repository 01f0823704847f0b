"""The ways of sharded training that the benchmark ``fsdp_overlap`` compares.

FSDP overlaps by streams of the device, which a processor has not: its collectives would block. So they are
given to it as asynchronous ones (``set_custom_all_gather``, ``set_custom_reduce_scatter``), which are waited
for where the stream would be: a gathered parameter before it is used, the gradients at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.ddp_models import Sizes, make_model
from benchmarks.ddp_ways import Step

__all__ = ["ANNOTATED", "EAGER", "WAYS", "Setting", "Sharded", "remove_marks"]

EAGER = "eager"
ANNOTATED = "compiled, annotated"


@dataclass
class Compilation:
    """What Dynamo has made of a module.

    Attributes:
        graphs: how many it compiled.
        guards: how many values it checks at each call, for all graphs together.
    """

    graphs: int = 0
    guards: int = 0

    def count(self, guards: Sequence[Any]) -> list[bool]:
        """Keep all guards of a graph, and count them."""
        self.graphs += 1
        self.guards += len(guards)
        return [True] * len(guards)


@dataclass(frozen=True)
class Sharded:
    """A sharded model that is trained in one way.

    Attributes:
        model: its parameters are shards.
        step: forward, backward, and waiting for the gradients.
    """

    model: nn.Module
    step: Step
    compilation: Compilation


@dataclass(frozen=True)
class Setting:
    """What every way trains, on the ranks of ``mesh``."""

    sizes: Sizes
    batch: torch.Tensor
    backend: Any
    mesh: DeviceMesh


@dataclass
class _Gathering:
    """An all-gather that FSDP waits for when it needs the parameters."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


@dataclass
class _Scattering:
    """A reduce-scatter that `wait` waits for."""

    pending: list[Any] = field(default_factory=list)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)
        self.pending.append((work, input_tensor))

    def wait(self) -> None:
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


def remove_marks(model: nn.Module) -> None:
    """Take away what tells Dynamo that FSDP manages these modules; `fully_shard` sets it."""
    for module in model.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(mark, None)


def _shard(setting: Setting, *, blocks: bool) -> tuple[Any, _Scattering]:
    """Shard a new model: each block and the root, or the root alone."""
    model: Any = make_model(setting.sizes)
    if blocks:
        for block in model.blocks:
            fully_shard(block, mesh=setting.mesh)
    fully_shard(model, mesh=setting.mesh)
    units = [*model.blocks] if blocks else [model]
    scattering = _Scattering()
    for unit, following in zip(units, [*units[1:], None], strict=True):
        unit.set_custom_all_gather(_Gathering())
        unit.set_custom_reduce_scatter(scattering)
        if following is not None:
            unit.set_modules_to_forward_prefetch([following])
    return model, scattering


def _trained(
    model: nn.Module, run: Any, scattering: _Scattering, setting: Setting, compilation: Compilation
) -> Sharded:
    batch = setting.batch

    def step() -> None:
        model.zero_grad()
        run(batch).square().mean().backward()
        scattering.wait()

    return Sharded(model, step, compilation)


def _eager(setting: Setting) -> Sharded:
    model, scattering = _shard(setting, blocks=True)
    return _trained(model, model, scattering, setting, Compilation())


def _compiled(setting: Setting, *, blocks: bool = True, marks: bool = True) -> Sharded:
    model, scattering = _shard(setting, blocks=blocks)
    if not marks:
        remove_marks(model)
    compilation = Compilation()
    run = torch.compile(model, backend=setting.backend, options={"guard_filter_fn": compilation.count})
    return _trained(model, run, scattering, setting, compilation)


WAYS: dict[str, Callable[[Setting], Sharded]] = {
    EAGER: _eager,
    ANNOTATED: _compiled,
    "compiled, not annotated": lambda setting: _compiled(setting, marks=False),
    "compiled, no borders inside": lambda setting: _compiled(setting, blocks=False),
}
"""Ways of training. Without borders inside, the model is one unit: gathered before it, reduced after it."""
