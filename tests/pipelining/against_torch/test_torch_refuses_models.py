"""Models and arguments that ``torch.distributed.pipelining`` refuses or fixes for ever: each test first shows
that it (still) does, then that partita equals the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional

from partita import pipelining as ours
from partita.errors import SignatureMismatch
from partita.runtime import Comm, InProcessWorld

CPU = torch.device("cpu")
MICROBATCHES = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Three(nn.Module):
    """Three linear layers, for subclasses to use as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _x(samples: int = 2 * MICROBATCHES) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH)


def _spec(package: Any, after: str = "bc") -> dict[str, Any]:
    """A cut before each of these layers."""
    return dict.fromkeys(after, package.SplitPoint.BEGINNING)


def _uncut(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole model's output and gradients over the microbatches."""
    outputs = []
    for part in _x().split(2):
        outputs.append(model(part, *args, **kwargs))
        (functional.mse_loss(outputs[-1], torch.zeros_like(part)) / MICROBATCHES).backward()
    return torch.cat(outputs).detach(), _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _ours(
    model: nn.Module, example: tuple[Any, ...], *args: Any, options: Any = None, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a training step of three ranks returns and leaves in ``.grad``."""
    x = _x()
    pipe = ours.pipeline(model, (x[:2], *example), kwargs, split_spec=_spec(ours), **(options or {}))

    def body(comm: Comm) -> tuple[Any, dict[str, Tensor]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = ours.ScheduleGPipe(stage, MICROBATCHES, functional.mse_loss)
        return schedule.step(x, *args, target=torch.zeros_like(x), **kwargs), _gradients(stage.module)

    results = InProcessWorld(3).run(body)
    return results[-1][0], {name: value for _, gradients in results for name, value in gradients.items()}


def _their_schedule(module: nn.Module, *example: Any, **kwargs: Any) -> theirs.ScheduleGPipe:
    """The whole model as one stage, captured."""
    stage = theirs.pipeline(module, (_x(2), *example), kwargs).build_stage(0, CPU)
    return theirs.ScheduleGPipe(stage, MICROBATCHES, loss_fn=functional.mse_loss)


# --- arguments ----------------------------------------------------------------


class Scaled(Three):
    def forward(self, x: Tensor, by: int) -> Tensor:
        return self.c(self.b(self.a(x)) * by)


@pytest.mark.usefixtures("alone")
def test_an_int_argument_can_not_be_given_to_a_step() -> None:
    x, target = _x(), torch.zeros_like(_x())
    with pytest.raises(RuntimeError, match=r"failed to run forward|Number of values \(2\)"):
        _their_schedule(_model(Scaled), 3).step(x, 3, target=target)
    manual = theirs.PipelineStage(_model(Scaled), 0, 1, CPU)
    with pytest.raises((RuntimeError, AttributeError), match=r"has type int|'int' object"):
        theirs.ScheduleGPipe(manual, MICROBATCHES, loss_fn=functional.mse_loss).step(x, 3, target=target)
    assert_equal(_ours(_model(Scaled), (3,), 3), _uncut(_model(Scaled), 3))


def test_another_int_than_that_of_the_capture_is_ignored_and_here_refused() -> None:
    x = _x(2)
    (output,) = theirs.pipeline(_model(Scaled), (x, 3), split_spec=_spec(theirs))(x, 5)
    assert torch.equal(output, _model(Scaled)(x, 3))
    pipe = ours.pipeline(_model(Scaled), (x, 3), split_spec=_spec(ours))
    with pytest.raises(SignatureMismatch, match="the call brings 5 for by = 3"):
        pipe(x, 5)
    assert torch.equal(pipe(x, 3), _model(Scaled)(x, 3))


class Masked(Three):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).masked_fill(mask, 0.0))


@pytest.mark.usefixtures("alone")
def test_a_mask_of_batch_1_by_keyword_can_not_be_given_to_a_step() -> None:
    x, mask = _x(), torch.arange(WIDTH)[None] % 3 == 0
    with pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 1"):
        _their_schedule(_model(Masked), mask=mask).step(x, target=torch.zeros_like(x), mask=mask)
    assert_equal(_ours(_model(Masked), (), mask=mask), _uncut(_model(Masked), mask=mask))


# --- models -------------------------------------------------------------------


class Branching(nn.Linear):
    """Which way it goes depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if x.sum() > 0 else super().forward(x)


def _branching() -> nn.Module:
    model = Three()
    model.b = Branching(WIDTH, WIDTH)
    return model


def test_a_model_that_can_not_be_captured_can_not_be_cut() -> None:
    model = _model(_branching)
    assert {bool(model.a(part).sum() > 0) for part in _x().split(2)} == {True, False}  # both ways are taken
    with pytest.raises(RuntimeError, match="cannot capture your model as a full graph"):
        theirs.pipeline(_model(_branching), (_x(2),), split_spec=_spec(theirs))
    assert_equal(_ours(model, (), options={"frontend": "modules"}), _uncut(_model(_branching)))


class Residual(Three):
    """What the first stage makes goes to both later ones."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(self.b(first) + first) * first


def _residual(comm: Comm, package: str) -> tuple[list[Any] | None, dict[str, list[Any]]]:
    torch.set_num_threads(1)
    model, x, schedule = _model(Residual), _x(), None
    if package == "theirs":
        stage = theirs.pipeline(model, (x[:2],), split_spec=_spec(theirs)).build_stage(comm.rank, CPU)
        schedule = theirs.ScheduleGPipe(stage, MICROBATCHES, loss_fn=functional.mse_loss)
        module = stage.submod
    else:
        mine = ours.pipeline(model, (x[:2],), split_spec=_spec(ours)).build_stage(comm.rank, comm=comm)
        schedule = ours.ScheduleGPipe(mine, MICROBATCHES, functional.mse_loss)
        module = mine.module
    keywords = {"target": torch.zeros_like(x)} if comm.rank == 2 else {}
    output = schedule.step(*((x,) if comm.rank == 0 else ()), **keywords)
    gradients = {name: value.tolist() for name, value in _gradients(module).items()}
    return None if output is None else output.tolist(), gradients


def test_a_residual_that_two_later_stages_use_can_not_be_trained() -> None:
    there = endings(3, _residual, "theirs")
    assert any("skip connections not supported" in ending.text for ending in there)
    here = endings(3, _residual, "ours")
    assert [ending.error for ending in here] == [None] * 3, "\n".join(ending.text for ending in here)
    output, gradients = _uncut(_model(Residual))
    assert torch.equal(torch.tensor(here[2].result[0]), output)
    piped = {name: torch.tensor(value) for ending in here for name, value in ending.result[1].items()}
    assert_equal(piped, gradients)
