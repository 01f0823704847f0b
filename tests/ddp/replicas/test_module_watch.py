"""What is put into a module after it has been replicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import WIDTH, batch, loss_of, seeded
from torch import nn

from partita.ddp import replicate
from partita.ddp.replicas.module_watch import ModuleWatch
from partita.errors import ExecutionError


def _watch(module: nn.Module, **options: Any) -> ModuleWatch:
    arguments: dict[str, Any] = {"ignored": (), "with_buffers": True} | options
    return ModuleWatch(module, {n: p for n, p in module.named_parameters() if p.requires_grad}, **arguments)


def test_buffers_set_anew_are_followed_in_the_order_of_before() -> None:
    module = models.MovingMean()
    watch = _watch(module)
    assert not watch.look(module)
    del module.mean
    module.register_buffer("mean", torch.ones(WIDTH))
    assert watch.look(module)
    assert list(watch.buffers) == ["mean", "seen"]
    assert watch.buffers["mean"] is module.mean
    assert watch.fault() is None
    assert not watch.look(module)


def _another_head(module: nn.Sequential) -> None:
    module[-1] = nn.Linear(WIDTH, 3)


def _another_weight(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def _loaded(module: nn.Sequential) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def _unfrozen_later(module: nn.Sequential) -> None:
    module.append(nn.Linear(3, 3).requires_grad_(False))
    module(torch.zeros(1, WIDTH))
    module[-1].requires_grad_(True)


def _one_more_buffer(module: nn.Sequential) -> None:
    module[0].register_buffer("scale", torch.ones(3))


def _longer_buffer(module: nn.Sequential) -> None:
    module[-2].running_mean = torch.zeros(2 * WIDTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_head, "parameter '2.weight' was put into the module after it had been replicated"),
        (_another_weight, "parameter '0.weight' was put into the module"),
        (_loaded, "parameter '0.weight' was put into the module"),
        (_unfrozen_later, "parameter '3.weight' was put into the module"),
        (nn.Module.double, "parameter '0.weight' was float32 on cpu .* and is float64 on cpu now"),
        (_one_more_buffer, r"buffer '0.scale' was not there .* and is float32\[3\] on cpu now"),
        (_longer_buffer, r"buffer '1.running_mean' was float32\[12\] on cpu .* ignored=\['1.running_mean'\]"),
    ],
)
def test_what_could_not_be_reduced_or_sent_is_an_error(
    change: Callable[[nn.Sequential], Any], message: str
) -> None:
    def body(comm: Any) -> None:
        module: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
        replicate(module, comm)
        loss_of(module(batch(0, 0))).backward()
        module.eval()
        change(module)
        module(batch(1, 0))

    with pytest.raises(ExecutionError, match=f"{message}.*: call replication.close.* and replicate.* again"):
        alone(body)


def _another_activation(module: nn.Sequential) -> None:
    module[1] = nn.Sigmoid()


def _frozen_head(module: nn.Sequential) -> None:
    module[-1] = nn.Linear(WIDTH, 3).requires_grad_(False)


def _ignored_weight(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def _reparametrised(module: nn.Sequential) -> None:
    nn.utils.parametrize.register_parametrization(module[-1], "weight", nn.Identity())


@pytest.mark.parametrize("change", [_another_activation, _frozen_head, _ignored_weight, _reparametrised])
def test_what_changes_nothing_that_is_reduced_is_allowed(change: Callable[[nn.Sequential], Any]) -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, ignored=["0.weight"])
        change(module)
        loss_of(module(batch(0, 0))).backward()
        assert module[2].weight.grad is not None

    alone(body)


def test_other_tensors_in_a_functional_call_are_none_of_the_modules() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm)
        doubled = {name: value * 2 for name, value in module.named_parameters()}
        loss_of(torch.func.functional_call(module, doubled, (batch(0, 0),))).backward()
        assert all(value.grad is not None for value in module.parameters())

    alone(body)


def test_buffers_that_are_not_sent_may_change() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(nn.Sequential(nn.Linear(WIDTH, 3)), comm, broadcast_buffers=False)
        _one_more_buffer(module)
        module(batch(0, 0))

    alone(body)
