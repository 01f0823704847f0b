"""What ``replicate`` refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.ddp.alone import alone
from tests.group_of_one import group_of_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from partita.ddp import replicate
from partita.errors import ArgumentError


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(2, 2))


def _tied_sparse() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 3))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {"bucket_cap_mb": 0}, "bucket_cap_mb is 0: give a size above 0"),
        (lambda: nn.Linear(2, 2), {"initial": "guess"}, "initial is 'broadcast' or 'check', got 'guess'"),
        (lambda: nn.Linear(2, 2), {"ignored": ["x"]}, "ignored names 'x', which the module does not have"),
        (lambda: nn.Linear(2, 2), {"inner": "fast"}, "inner is 'inductor', 'aot_eager', a PieceRunner, or a"),
        (nn.ReLU, {}, "no parameter that requires a gradient"),
        (_tied_sparse, {}, r"'0.weight' is the weight of an embedding with sparse .* of '1' \(Linear\) too"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, "'weight' is on the meta device"),
        (lambda: nn.LazyLinear(2), {}, "'weight' has no shape yet"),
        (lambda: torch.compile(nn.Linear(2, 2)), {}, "compiled already: replicate it first"),
        (_scripted, {}, "is a TorchScript one, whose class can't be another: replicate the nn.Module"),
    ],
)
def test_what_can_not_be_replicated_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    def body(comm: Any) -> None:
        with pytest.raises(ArgumentError, match=message):
            replicate(make(), comm, **options)

    alone(body)


def test_shards_are_refused() -> None:
    """The process was aborted in gloo, which was given the memory of a DTensor."""

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    def body(comm: Any) -> None:
        module = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)), shard)
        with pytest.raises(
            ArgumentError, match=r"'weight' is a DTensor \(S\(0\)\), .* fully_shard\(module, me"
        ):
            replicate(module, comm)

    with group_of_one():
        alone(body)


def test_a_module_is_replicated_once() -> None:
    def body(comm: Any) -> None:
        inner = nn.Linear(2, 2)
        module = replicate(inner, comm)
        with pytest.raises(ArgumentError, match="replicated already"):
            replicate(module, comm)
        with pytest.raises(ArgumentError, match=r"'0.weight' belongs to a replicated module already"):
            replicate(nn.Sequential(inner), comm)

    alone(body)


def test_modules_that_share_a_parameter_are_replicated_together() -> None:
    """It was said to replicate the outer one; neither is, of two stages on one rank."""

    first, last = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    last.weight = first.weight

    def each(comm: Any) -> None:
        module = replicate(first, comm)
        with pytest.raises(ArgumentError, match=r"'weight' belongs to another module too.*ModuleList of"):
            replicate(last, comm)
        module.replication.close()

    def together(comm: Any) -> None:
        both = replicate(nn.ModuleList([first, last]), comm)
        last(first(torch.tensor([1, 2]))).sum().backward()
        assert both.replication.last_pass is not None

    alone(each)
    alone(together)
