"""What may go from one stage to the next: torch refuses or garbles what is more than contiguous float tensors
of one shape. Each case runs on two processes with torch's manual stages, then with ours, which equal the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional

from partita import pipelining as ours
from partita.runtime import Comm, split_tree

CPU = torch.device("cpu")


class Stage(nn.Module):
    """A linear layer before or after what the case is about."""

    def __init__(self, work: Callable[..., Any], *, layer_first: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._work = work
        self._layer_first = layer_first

    def forward(self, *args: Any) -> Any:
        return self._work(self.layer(*args)) if self._layer_first else self.layer(self._work(*args))


@dataclass(frozen=True)
class Case:
    """What the first stage hands on, what the second makes of it, and for how many samples."""

    hand_on: Callable[[Tensor], Any]
    take: Callable[..., Tensor]
    samples: int = 8
    train: bool = True

    def stages(self) -> tuple[Stage, Stage]:
        torch.manual_seed(0)
        return Stage(self.hand_on, layer_first=True), Stage(self.take, layer_first=False)

    def data(self) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(self.samples, WIDTH)


def _same(h: Tensor) -> Tensor:
    return h


def _with_indices(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, torch.arange(h.shape[0]).flip(0)


def _picked(h: Tensor, indices: Tensor) -> Tensor:
    return h[indices]


def _named(h: Tensor) -> dict[str, Tensor]:
    return {"h": h}


def _by_name(values: dict[str, Tensor]) -> Tensor:
    return values["h"]


def _transposed(h: Tensor) -> Tensor:
    return h.t()


def _halves(h: Tensor) -> tuple[Tensor, ...]:
    return h.chunk(2, 1)


def _joined(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right], 1)


CASES = {
    "inference with a batch that does not divide": Case(_same, _same, samples=10, train=False),
    "training with a batch that does not divide": Case(_same, _same, samples=10),
    "int activations": Case(_with_indices, _picked),
    "dict outputs": Case(_named, _by_name),
    "transposed outputs": Case(_transposed, _transposed),
    "chunked outputs": Case(_halves, _joined),
}


def _run(comm: Comm, package: str, name: str) -> tuple[list[Any] | None, list[Any] | None]:
    """The last rank's output, and the gradient of this rank's weight."""
    torch.set_num_threads(1)
    # memory that nobody has written to holds NaN and the largest integers, not what happened to be there
    torch.use_deterministic_algorithms(True)
    case = CASES[name]
    module, x = case.stages()[comm.rank], case.data()
    loss = functional.mse_loss if case.train else None
    schedule: Any
    if package == "theirs":
        stage = theirs.PipelineStage(module, comm.rank, 2, CPU)
        schedule = theirs.ScheduleGPipe(stage, 4, loss_fn=loss)
    else:
        mine = ours.PipelineStage(module, comm.rank, 2, CPU)
        mine.comm = comm
        schedule = ours.ScheduleGPipe(mine, 4, loss)
    args = (x,) if comm.rank == 0 else ()
    keywords = {"target": torch.zeros_like(x)} if case.train and comm.rank else {}
    with torch.set_grad_enabled(case.train):
        output = schedule.step(*args, **keywords)
    gradient = module.layer.weight.grad
    return (
        None if output is None else output.tolist(),
        None if gradient is None else gradient.tolist(),
    )


def _uncut(case: Case) -> tuple[Tensor, list[Tensor | None]]:
    first, second = case.stages()
    parts, plan = split_tree(case.data(), 4)
    outputs = []
    for part, weight in zip(parts, plan.weights, strict=True):
        handed = first(part)
        output = second(*handed) if isinstance(handed, tuple) else second(handed)
        if case.train:
            (functional.mse_loss(output, torch.zeros_like(output)) * weight).backward()
        outputs.append(output.detach())
    return torch.cat(outputs), [first.layer.weight.grad, second.layer.weight.grad]


def _goes_wrong(name: str, expected: Tensor) -> bool:
    """Whether torch's stages raise, crash or return something else."""
    there = endings(2, _run, "theirs", name)
    if any(ending.error is not None or ending.exitcode != 0 for ending in there):
        return True
    output = torch.tensor(there[1].result[0])
    return output.shape != expected.shape or not torch.allclose(output, expected)


@pytest.mark.parametrize("name", CASES)
def test_what_torchs_stages_can_not_hand_on(name: str) -> None:
    expected, gradients = _uncut(CASES[name])
    assert _goes_wrong(name, expected)
    here = endings(2, _run, "ours", name)
    assert [ending.error for ending in here] == [None, None], "\n".join(ending.text for ending in here)
    assert torch.equal(torch.tensor(here[1].result[0]), expected)
    for ending, gradient in zip(here, gradients, strict=True):
        actual = ending.result[1]
        assert (actual is None) == (gradient is None)
        assert gradient is None or torch.equal(torch.tensor(actual), gradient)
