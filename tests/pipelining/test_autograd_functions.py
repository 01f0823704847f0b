"""A step of ranks over a model with custom ``torch.autograd.Function``s is the eager model over the same
microbatches, with the functions' own backward passes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partita
from partita.pipelining import (
    Pipe,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    pipeline,
)
from partita.runtime import Comm, InProcessWorld

V_PLACEMENT = {0: (0, 3), 1: (1, 2)}
INTERLEAVED = {0: (0, 2), 1: (1, 3)}
MICROBATCHES = 4


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ScaledProduct(torch.autograd.Function):
    """A product whose gradients are not its derivatives, as in a router's multiplier."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b * 3, gradient * a


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = ScaledProduct.apply(h, StraightThrough.apply(h * 2).tanh()) + x
        return x


def loss(output: Tensor, _target: object = None) -> Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def pipe(model: Model) -> Pipe:
    return pipeline(model, (torch.randn(2, 4),), stages=4)


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        (Schedule1F1B, {rank: (rank,) for rank in range(4)}),
        (ScheduleInterleavedZeroBubble, INTERLEAVED),
        (ScheduleZBVZeroBubble, V_PLACEMENT),
        (ScheduleDualPipeV, V_PLACEMENT),
    ],
    ids=["1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"],
)
def test_gradients_are_those_of_the_eager_model(
    model: Model, pipe: Pipe, schedule: Any, placement: dict[int, tuple[int, ...]]
) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def body(comm: Comm) -> dict[str, Tensor | None]:
        own = copy.deepcopy(pipe)
        stages = [own.build_stage(index, comm=comm) for index in placement[comm.rank]]
        schedule(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss).step(x, target=x)
        return {name: p.grad for stage in stages for name, p in stage.module.named_parameters()}

    gradients: dict[str, Tensor | None] = {}
    for of_rank in InProcessWorld(len(placement)).run(body):
        gradients |= of_rank
    whole = copy.deepcopy(model)
    for microbatch in x.chunk(MICROBATCHES):
        (loss(whole(microbatch)) / MICROBATCHES).backward()
    for name, parameter in whole.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("way", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_stages_keep_them(model: Model, pipe: Pipe, way: str) -> None:
    cut = copy.deepcopy(pipe)
    if way == "compiled":
        for index in range(cut.num_stages):
            cut.get_stage_module(index).compile(backend="aot_eager")

    def call(x: Tensor) -> Any:
        return cut(x) if way == "compiled" else checkpoint(cut, x, use_reentrant=False)

    x = torch.randn(2, 4)
    call(x).square().mean().backward()
    whole = copy.deepcopy(model)
    whole(x).square().mean().backward()
    parameters = dict(cut.named_parameters())
    expected = dict(whole.named_parameters())
    assert len(parameters) == len(expected)
    for name, parameter in parameters.items():
        assert torch.equal(parameter.grad, expected[name.split(".", 2)[2]].grad), name


def test_a_local_call_is_the_model(model: Model, pipe: Pipe) -> None:
    partita.verify(pipe, model, (torch.randn(3, 4).requires_grad_(),)).check()
