"""Buckets from measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import seeded

from partita.ddp import partita_ddp, replicate
from partita.ddp.reducing.tuning import measure_links
from partita.errors import ArgumentError, PlanError
from partita.planning import Cluster


def test_a_plan_needs_measurements() -> None:
    def body(comm: Any) -> None:
        module = replicate(seeded(models.mlp), comm)
        with pytest.raises(PlanError, match="there is no measurement of any gradient"):
            module.replication.plan()
        assert measure_links(comm).ranks == 1

    alone(body)


def buckets(module: Any) -> int:
    return len(module.replication.rows())


def train(run: Any, steps: int) -> None:
    for step in range(steps):
        run.zero_grad()
        models.loss_of(run(models.batch(step, 0))).backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_buckets_are_planned_after_some_steps(compiled: bool) -> None:
    """On one rank a reduction takes no time, and one bucket is best."""

    def body(comm: Any) -> None:
        module = replicate(seeded(models.mlp), comm, bucket_cap_mb=1e-4, plan="measured", inner="aot_eager")
        run = torch.compile(module, backend=partita_ddp) if compiled else module
        train(run, 9)
        assert module.replication.reducer.measuring
        assert buckets(module) > 1
        train(run, 1)
        assert not module.replication.reducer.measuring
        assert buckets(module) == 1
        train(run, 2)

    alone(body)


def test_who_measures_by_hand_is_not_interfered_with() -> None:
    def body(comm: Any) -> None:
        module = replicate(seeded(models.mlp), comm, bucket_cap_mb=1e-4, plan="measured")
        with module.replication.measuring():
            train(module, 12)
            assert module.replication.reducer.measuring
        assert buckets(module) > 1
        plan = module.replication.plan()
        other = replicate(seeded(models.mlp), comm, bucket_cap_mb=1e-4, plan="measured")
        other.replication.use(plan)
        train(other, 12)
        assert not other.replication.reducer.samples

    alone(body)


def test_a_parameter_that_nobody_uses_comes_last() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.WithUnused), comm, bucket_cap_mb=1e-4)
        with module.replication.measuring():
            train(module, 8)
        plan = module.replication.plan(Cluster(2, 1e6), margin=0.0)
        assert {"never.weight", "never.bias"} <= set(plan.buckets[-1])
        module.replication.use(plan)
        train(module, 1)
        assert module.never.weight.grad is None
        assert module.body[0].weight.grad is not None

    alone(body)


def test_another_word_for_a_plan_is_refused() -> None:
    def body(comm: Any) -> None:
        with pytest.raises(ArgumentError, match="plan is a BucketPlan, 'measured' or None, got 'best'"):
            replicate(seeded(models.mlp), comm, plan="best")  # type: ignore[arg-type]

    alone(body)
