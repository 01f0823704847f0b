"""Values that lie in memory otherwise than in plain order: last bits depend on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.fuzz.script_models import OverChannels
from torch import Tensor, nn

from partita.cudagraphs import CudaGraphsRunner
from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld, PlainRunner

WIDTH, LENGTH, MICROBATCHES = 8, 3, 3


def convolution() -> nn.Module:
    return OverChannels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))


def normalisation() -> nn.Module:
    return OverChannels(nn.BatchNorm1d(WIDTH))


def model(*layers: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    return nn.Sequential(*layers).to(dtype)


def batch(samples: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(samples)).to(dtype)


def runners(compiler: str) -> Any:
    return {
        "aot_eager": "aot_eager",
        "plain": PlainRunner(),
        "recorded": CudaGraphsRunner(recorder="replay"),
    }[compiler]


def loss_of(output: Tensor, _target: object = None) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("compiler", ["aot_eager", "plain", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_arrives_in_another_layout_than_the_output_has(compiler: str, dtype: torch.dtype) -> None:
    """The convolution's output is transposed; the gradient of the linear layer behind it is in plain order.
    Recorded stages copied it into the layout of the output.
    """
    cut = model(convolution(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dtype=dtype)
    whole, x = copy.deepcopy(cut), batch(2 * MICROBATCHES, dtype)
    pipe = pipeline(cut, (x[:2],), split_spec={"0": SplitPoint.END}, compile=runners(compiler))

    def train(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_of, scale_grads=False)
        for _ in range(3):  # recorded, then replayed
            stage.module.zero_grad()
            schedule.step(*((x,) if comm.rank == 0 else ()), target=x)

    InProcessWorld(2).run(train)
    for part in x.chunk(MICROBATCHES):
        loss_of(whole(part)).backward()
    for mine, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_behind_a_normalisation_of_a_transposed_input(dtype: torch.dtype) -> None:
    """Torch's fake tensors say that the result is in plain order, where torch computes a linear layer in
    another way. With other sizes they remember it for sizes that are symbols.
    """
    whole = model(nn.Linear(WIDTH, WIDTH), normalisation(), nn.Linear(WIDTH, WIDTH), dtype=dtype).eval()
    pipe = pipeline(
        copy.deepcopy(whole),
        (batch(2, dtype),),
        split_spec={"1": SplitPoint.BEGINNING},
        compile="aot_eager",
    )

    def evaluate(comm: Comm) -> list[Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        stage.module.eval()
        schedule = Schedule1F1B(stage, 2, loss_of)
        inputs = (batch(samples, dtype) for samples in (4, 2, 6))
        return [schedule.eval(*((x,) if comm.rank == 0 else ())) for x in inputs]

    outputs = InProcessWorld(2).run(evaluate)[1]
    with torch.no_grad():
        for samples, output in zip((4, 2, 6), outputs, strict=True):
            assert torch.equal(output, torch.cat([whole(part) for part in batch(samples, dtype).chunk(2)]))
