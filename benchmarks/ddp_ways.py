"""The ways of data parallel training that the benchmark ``ddp_overlap`` compares.

In torch's peers of today, communication is in the graph that Inductor sees: compiled autograd puts it there
(``optimize_ddp="python_reducer"``), or the backward graph itself has an all-reduce for each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_models import Sizes, make_model, own_code
from partita.ddp import partita_ddp, replicate, use_partita_ddp_optimizer

__all__ = ["CAP_MB", "PLANNED", "WAYS", "Setting", "Step", "trainer"]

Step = Callable[[], None]

PLANNED = "partita_ddp, planned"
"""The way whose buckets are planned anew for each speed of the links."""

CAP_MB = 4
"""Of the buckets of all ways but the planned one."""

# what torch/_inductor/config.py recommends for this option (2.13)
_PASSES = [
    "reorder_communication_preserving_peak_memory",
    "sink_waits_iterative",
    "reorder_communication_preserving_peak_memory",
]
_REORDERED = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": _PASSES,
}


@dataclass(frozen=True)
class Setting:
    """What every way trains.

    Attributes:
        sizes: of the model and its batch.
        batch: of this rank.
        backend: compiles what is compiled.
        replica: the module of the planned way, so that its buckets can be planned.
    """

    sizes: Sizes
    batch: torch.Tensor
    backend: Any
    replica: Any

    def model(self) -> nn.Module:
        """Make the model, with code of its own."""
        return make_model(self.sizes)

    def wrapped(self) -> DistributedDataParallel:
        """Make the model in torch's DDP."""
        return DistributedDataParallel(self.model(), bucket_cap_mb=CAP_MB)


def trainer(module: Any, batch: torch.Tensor) -> Step:
    """One step of training, with the gradients left in the parameters."""

    def step() -> None:
        module.zero_grad()
        module(batch).square().mean().backward()

    return step


def _under(context: Callable[[], AbstractContextManager[Any]], step: Step) -> Step:
    def inside() -> None:
        with context():
            step()

    return inside


def _eager(setting: Setting) -> Step:
    return trainer(setting.wrapped(), setting.batch)


def _whole(setting: Setting) -> Step:
    compiled = torch.compile(setting.wrapped(), backend=setting.backend)
    return _under(_dynamo(optimize_ddp=False), trainer(compiled, setting.batch))


def _torch_optimizer(setting: Setting) -> Step:
    return trainer(torch.compile(setting.wrapped(), backend=setting.backend), setting.batch)


def _partita_optimizer(setting: Setting) -> Step:
    return _under(use_partita_ddp_optimizer, _torch_optimizer(setting))


def _partita(setting: Setting) -> Step:
    module: Any = replicate(setting.model(), bucket_cap_mb=CAP_MB, inner=setting.backend)
    return trainer(torch.compile(module, backend=partita_ddp), setting.batch)


def _planned(setting: Setting) -> Step:
    return trainer(torch.compile(setting.replica, backend=partita_ddp), setting.batch)


def _compiled_autograd(setting: Setting) -> Step:
    """DDP as it is: torch refuses its own reducer under compiled autograd, and the row says so."""
    return _whole_step(setting, _dynamo(compiled_autograd=True), nullcontext)


def _python_reducer(setting: Setting) -> Step:
    """DDP's communication in the graph of the backward pass, fused to buckets and waited for at the end."""
    return _whole_step(
        setting, _dynamo(compiled_autograd=True, optimize_ddp="python_reducer"), _inductor_as_it_was
    )


def _python_reducer_reordered(setting: Setting) -> Step:
    """The same, and Inductor's scheduler moves the communication."""

    @contextmanager
    def inductor() -> Iterator[None]:
        with _inductor_as_it_was(), _inductor(**_REORDERED)():
            yield

    return _whole_step(setting, _dynamo(compiled_autograd=True, optimize_ddp="python_reducer"), inductor)


def _traced(setting: Setting) -> Step:
    """Inductor fuses the all-reduces of the backward graph to buckets and moves them."""
    buckets = {"bucket_all_reduces_fx": "all", "bucket_all_reduces_fx_bucket_size_determinator": _cap}
    return _under(_inductor(**buckets, **_REORDERED), _traced_step(setting))


def _traced_scheduled(setting: Setting) -> Step:
    """Inductor's scheduling of the graph for overlap, by its estimates; they ask triton about a GPU."""
    scheduling = {
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "aten_distributed_optimizations.compute_estimator": "analytical",
    }
    return _under(_inductor(**scheduling), _traced_step(setting))


def _traced_step(setting: Setting) -> Step:
    """An all-reduce for each gradient in the backward graph, without DDP or compiled autograd.

    This is how torchtitan's SimpleFSDP replicates.
    """
    model = setting.model()
    batch = setting.batch

    def forward(x: torch.Tensor) -> torch.Tensor:
        replicas = {name: _MeanGradient.apply(value) for name, value in model.named_parameters()}
        return torch.func.functional_call(model, replicas, (x,))

    compiled = torch.compile(own_code(forward), backend=setting.backend)

    def step() -> None:
        model.zero_grad()
        compiled(batch).square().mean().backward()

    return step


class _MeanGradient(torch.autograd.Function):
    """The value itself; its gradient is averaged over all ranks, as an operator of the graph."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        collectives: Any = dist._functional_collectives  # noqa: SLF001
        return collectives.all_reduce(gradient / ranks, "sum", dist.group.WORLD)


def _cap(_bucket: int) -> int:
    """Megabytes of one of Inductor's buckets."""
    return CAP_MB


def _whole_step(
    setting: Setting,
    dynamo: Callable[[], AbstractContextManager[Any]],
    inductor: Callable[[], AbstractContextManager[Any]],
) -> Step:
    """A step that is compiled from forward to backward, so that compiled autograd takes part in it."""
    with dynamo(), inductor():
        module: Any = setting.wrapped()  # the Python reducer is chosen when DDP is made
    batch = setting.batch

    def train() -> None:
        module(batch).square().mean().backward()

    with dynamo():  # torch.compile asks here whether compiled autograd takes part
        compiled = torch.compile(own_code(train), backend=setting.backend)

    def step() -> None:
        module.zero_grad()
        with dynamo(), inductor():
            compiled()

    return step


def _dynamo(**settings: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch._dynamo.config.patch(settings)  # noqa: SLF001, TID251


def _inductor(**settings: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch._inductor.config.patch(settings)  # noqa: SLF001, TID251


def _inductor_as_it_was() -> AbstractContextManager[Any]:
    """Let DDP set Inductor's fusion of all-reduces for itself alone: it sets it for the whole process."""
    return torch._inductor.config.patch(  # noqa: SLF001, TID251
        _fuse_ddp_communication=True, _fuse_ddp_bucket_size=CAP_MB
    )


WAYS: dict[str, Callable[[Setting], Step]] = {
    "DDP": _eager,
    "DDP compiled": _whole,
    "DDPOptimizer of torch": _torch_optimizer,
    "DDPOptimizer of partita": _partita_optimizer,
    "compiled autograd": _compiled_autograd,
    "python_reducer": _python_reducer,
    "python_reducer, reordered": _python_reducer_reordered,
    "traced all-reduce, reordered": _traced,
    "traced all-reduce, scheduled": _traced_scheduled,
    "partita_ddp": _partita,
    PLANNED: _planned,
}
"""From its name to what makes a step of it, in the order in which they are made and take their turns."""
