"""When gradients are reduced. What comes of it, between processes: ``tests/composition``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.group_of_one import group_of_one
from torch import nn
from torch.distributed._composable.replicate import replicate

import partita.ddp
from partita._torch.distributed.gradient_sync import sharded_roots
from partita.errors import ExecutionError
from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.pipelining.stages.data_parallel import GradientReduction, gradient_reduction
from partita.runtime import Comm, InProcessWorld


def test_a_plain_module_reduces_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert sharded_roots(module) == []
    assert gradient_reduction(module) is None
    assert gradient_reduction(torch.compile(module, backend="eager")) is None


def test_torchs_composable_replicate_is_refused() -> None:
    """It reduces within every microbatch: weights were off by millionths, and replicas differed."""

    def refused() -> None:  # the module is gone with it, before the group
        module = nn.Sequential(nn.Linear(2, 2))
        replicate(module)
        with pytest.raises(
            ExecutionError, match=r"composable replicate\(\), which reduces in every microbatch"
        ):
            gradient_reduction(nn.Sequential(module))

    with group_of_one():
        refused()


def test_a_module_that_partita_replicates_reduces_once_a_step() -> None:
    """It did in every microbatch: as many messages as microbatches, and other roundings than the model's."""

    def body(comm: Comm) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.END})
        stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
        passes = [0, 0]
        for stage in stages:
            stage.module = module = partita.ddp.replicate(stage.module, comm)

            def count(_: object, index: int = stage.index) -> None:
                passes[index] += 1

            module.replication.reducer.pass_ended = count
        schedule = Schedule1F1B(stages, 4, nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(x, target=x)
        reduction = gradient_reduction(stages[0].module)
        assert reduction is not None
        with pytest.raises(
            ExecutionError, match=r"stage 0 went through partita\.ddp\.replicate and is to be"
        ):
            reduction.check_recompute(0)
        return passes

    assert InProcessWorld(1).run(body) == [[2, 2]]


def test_a_last_microbatch_without_gradients_is_an_error() -> None:
    reduction = GradientReduction(nn.Linear(2, 2))
    reduction.begin(2)
    ran: list[int] = []
    reduction.backward([], lambda: ran.append(0))
    with pytest.raises(ExecutionError, match="does not depend on this stage, which is data parallel"):
        reduction.backward([], lambda: ran.append(1))
    assert ran == []
    reduction.module.requires_grad_(False)  # since the step began, or before: nothing is to be reduced
    reduction.begin(1)
    reduction.backward([], lambda: ran.append(2))
    assert ran == []


def test_an_earlier_microbatch_without_gradients_is_none() -> None:
    reduction = GradientReduction(nn.Linear(2, 2))
    reduction.begin(2)
    ran: list[int] = []
    reduction.backward([], lambda: ran.append(0))
    reduction.backward([torch.ones(1)], lambda: ran.append(1))
    assert ran == [1]
    assert reduction.at_once


def test_a_static_graph_is_refused_where_there_are_several_microbatches() -> None:
    """torch fails there with an assertion of its own."""
    wrapped = SimpleNamespace(static_graph=True, require_backward_grad_sync=True)
    reduction = GradientReduction(nn.Linear(2, 2), replicated=wrapped)
    reduction.begin(1)
    with pytest.raises(ExecutionError, match="and a step has 2, of which only the last may reduce: leave"):
        reduction.begin(2)
