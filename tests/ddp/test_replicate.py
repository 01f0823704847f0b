"""What a replicated module is to its user."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import batch, loss_of, seeded
from torch import nn

from partita.ddp import replicate
from partita.errors import ExecutionError
from partita.runtime import Tracer


def test_a_parameter_that_is_trained_later_is_an_error() -> None:
    def body(comm: Any) -> None:
        plain = seeded(models.mlp)
        plain[0].weight.requires_grad_(False)
        module: Any = replicate(plain, comm)
        module[0].weight.requires_grad_(True)
        with pytest.raises(ExecutionError, match=r"'0.weight' was frozen when the module was replicated"):
            module(batch(0, 0))

    alone(body)


def test_copies_and_pickles_are_plain_modules() -> None:
    def body(comm: Any) -> None:
        plain = seeded(models.WithUnused)
        names = list(plain.state_dict())
        module: Any = replicate(plain, comm)
        assert module is plain
        assert isinstance(module, models.WithUnused)
        assert list(module.state_dict()) == names
        copied = copy.deepcopy(module)
        assert type(copied) is models.WithUnused
        loss_of(copied(batch(0, 0))).backward()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is models.WithUnused
        assert "bucket" in str(module.replication)

    alone(body)


def test_buckets_are_in_the_log_and_in_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(0)

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, bucket_cap_mb=0.001, tracer=tracer)
        loss_of(module(batch(0, 0))).backward()

    with caplog.at_level(logging.INFO, "partita.ddp"):
        alone(body)
    assert "exposed  parameters" in caplog.text
    assert "8.bias" in caplog.text
    reduced = [event for event in tracer.events if event.category == "reduce"]
    assert [event.name for event in reduced][:2] == ["bucket 0", "bucket 1"]
    assert reduced[0].args["bytes"] >= 1048


def test_after_close_the_module_trains_alone() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm)
        module.replication.close()
        assert type(module) is nn.Sequential
        loss_of(module(batch(0, 0))).backward()
        assert module[0].weight.grad is not None

    alone(body)


def test_another_module_of_the_same_class_is_not_replicated() -> None:
    def body(comm: Any) -> None:
        module = replicate(nn.Linear(2, 2), comm)
        other = type(module)(2, 2)
        with pytest.raises(ExecutionError, match="a copy of a replicated module, and not replicated itself"):
            other.no_sync().__enter__()

    alone(body)
