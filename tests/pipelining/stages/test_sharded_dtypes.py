"""Stages that ``fully_shard`` computes in another dtype than they were cut in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.dtype_reading_norm import DtypeReadingNorm
from tests.group_of_one import group_of_one
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining import Pipe, ScheduleInterleaved1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FLOAT32_OUT = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


class _Model(nn.Module):
    """Keeps its input, a float32, to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), DtypeReadingNorm(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)) + x)


BATCH, TARGET = torch.randn(4, 8), torch.randn(4, 8)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


def _cut(model: nn.Module, **options: Any) -> Pipe:
    return pipeline(model, (BATCH[:2],), split_spec={"norm": SplitPoint.BEGINNING}, **options)


def _gradients(module: nn.Module) -> list[Tensor]:
    """Those of a sharded module, whole."""
    gradients = [parameter.grad for parameter in module.parameters()]
    return [one.full_tensor() for one in gradients if isinstance(one, DTensor)]


def _step(
    pipe: Pipe, policy: MixedPrecisionPolicy, *, autocast: bool = False, batch: Tensor = BATCH
) -> list[Tensor]:
    """The losses and the gradients of a step of two microbatches."""

    def run(comm: Comm) -> list[Tensor]:
        stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
        for stage in stages:
            fully_shard(stage.module, mp_policy=policy)
        losses: list[Tensor] = []
        schedule = ScheduleInterleaved1F1B(stages, 2, _loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            schedule.step(batch, target=TARGET, losses=losses)
        return losses + [one for stage in stages for one in _gradients(stage.module)]

    return InProcessWorld(1).run(run)[0]


def _uncut(
    model: nn.Module, policy: MixedPrecisionPolicy, *, autocast: bool = False, batch: Tensor = BATCH
) -> list[Tensor]:
    module = fully_shard(model, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    losses = []
    for last, (x, target) in enumerate(zip(batch.split(2), TARGET.split(2), strict=True)):
        module.set_requires_gradient_sync(bool(last))
        module.set_is_last_backward(bool(last))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(_loss(model(x), target))
        (losses[-1] / 2).backward()
    return losses + _gradients(model)


def test_a_graph_that_has_dtypes_of_the_cut_is_refused() -> None:
    """It ended in torch's "mat1 and mat2 must have the same dtype", or rounded otherwise."""
    with group_of_one(), pytest.raises(SignatureMismatch, match=r"computes in bfloat16.*as 'to' of norm has"):
        _step(_cut(_Model()), FLOAT32_OUT)


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT32_OUT], ids=["bfloat16", "float32 out"])
def test_a_policy_that_would_convert_what_crosses_is_refused(policy: MixedPrecisionPolicy) -> None:
    """It ended in "TreeSpec.__init__() got an unexpected keyword argument"."""
    with group_of_one(), pytest.raises(ExecutionError, match=r"stage 0 is sharded with a MixedPrecisionPol"):
        _step(_cut(_Model(), frontend="modules"), policy)


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_both_run_sharded_under_autocast(frontend: str) -> None:
    model = _Model()
    with group_of_one():
        with torch.autocast("cpu", torch.bfloat16):
            pipe = _cut(copy.deepcopy(model), frontend=frontend)
        actual = _step(pipe, MixedPrecisionPolicy(), autocast=True)
        expected = _uncut(model, MixedPrecisionPolicy(), autocast=True)
    assert len(actual) == len(expected) == 7
    for here, there in zip(actual, expected, strict=True):
        assert torch.equal(here, there)


def test_a_policy_that_converts_parameters_alone_serves_the_models_own_code() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), DtypeReadingNorm(), nn.Linear(8, 8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    tokens = torch.randint(0, 9, (4,))
    cuts = {"1": SplitPoint.BEGINNING}
    with group_of_one():
        pipe = pipeline(copy.deepcopy(model), (tokens[:2],), split_spec=cuts, frontend="modules")
        actual = _step(pipe, policy, batch=tokens)
        expected = _uncut(model, policy, batch=tokens)
    assert len(actual) == len(expected) == 6
    for here, there in zip(actual, expected, strict=True):
        assert torch.equal(here, there)
