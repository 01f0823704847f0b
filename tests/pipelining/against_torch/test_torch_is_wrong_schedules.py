"""Where torch's schedules are wrong: each test shows that they (still) are, and that ours are right."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional

from partita import pipelining as ours
from partita.runtime import Comm, InProcessWorld

CPU = torch.device("cpu")
MICROBATCHES = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("alone"),
]


@pytest.fixture
def alone(alone: None) -> Iterator[None]:
    """A process group of one rank, which holds all of torch's stages, and says nothing."""
    logging.getLogger("torch.distributed.pipelining.schedules").disabled = True
    yield
    logging.getLogger("torch.distributed.pipelining.schedules").disabled = False


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, WIDTH), torch.zeros(2 * MICROBATCHES, WIDTH)


def _theirs(modules: list[nn.Module]) -> None:
    if torch.__version__.startswith("2.11."):
        pytest.skip("stages on one rank send shapes to it over gloo there, which has no connection to itself")
    x, target = _data()
    stages = [
        theirs.PipelineStage(module, number, len(modules), CPU) for number, module in enumerate(modules)
    ]
    schedule = theirs.ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=functional.mse_loss)
    schedule.step(x, target=target)


def _ours(modules: list[nn.Module]) -> None:
    x, target = _data()
    spec = {str(number): ours.SplitPoint.END for number in range(len(modules) - 1)}
    pipe = ours.pipeline(nn.Sequential(*modules), (x[:2],), split_spec=spec)

    def body(comm: Comm) -> None:
        stages = [pipe.build_stage(number, comm=comm) for number in range(len(modules))]
        schedule = ours.ScheduleInterleavedZeroBubble(stages, MICROBATCHES, functional.mse_loss)
        schedule.step(x, target=target)

    InProcessWorld(1).run(body)


def _uncut(modules: list[nn.Module]) -> None:
    x, target = _data()
    model = nn.Sequential(*modules)
    for part, wanted in zip(x.split(2), target.split(2), strict=True):
        (functional.mse_loss(model(part), wanted) / MICROBATCHES).backward()


def _gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for parameter in nn.ModuleList(modules).parameters()]


def _assert_ours_right(modules: list[nn.Module]) -> None:
    expected = copy.deepcopy(modules)
    _uncut(expected)
    _ours(modules)
    for gradient, wanted in zip(_gradients(modules), _gradients(expected), strict=True):
        assert (gradient is None) == (wanted is None)
        assert gradient is None or torch.equal(gradient, wanted)


def _linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(3)]


def test_zero_bubble_behind_frozen_stages_loses_the_gradients() -> None:
    def frozen() -> list[nn.Module]:
        first, second, last = _linears()
        return [first.requires_grad_(False), second.requires_grad_(False), last]

    _assert_ours_right(frozen())
    modules = frozen()
    _theirs(modules)
    assert _gradients(modules) == [None] * 6  # the last two should have one


def test_zero_bubble_does_not_run_the_hooks_of_gradients() -> None:
    def hooked(seen: list[str]) -> list[nn.Module]:
        modules = _linears()
        for name, parameter in nn.ModuleList(modules).named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        return modules

    seen: list[str] = []
    _ours(hooked(seen))
    assert sorted(seen) == sorted(
        f"{number}.{name}" for number in range(3) for name in ("weight", "bias") for _ in range(MICROBATCHES)
    )
    seen = []
    _theirs(hooked(seen))
    assert {name[0] for name in seen} == {"0"}  # the first stage goes back whole


class Shared(nn.Module):
    """A parameter in two places of one stage, one of which goes through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) * self.a.weight.sum()


def test_zero_bubble_with_a_parameter_in_two_places_crashes() -> None:
    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), Shared()]

    _assert_ours_right(modules())
    with pytest.raises(RuntimeError, match="already been freed"):
        _theirs(modules())


class Reuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("made", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.made.copy_(self.layer(x))
        return self.made


def test_a_stage_that_returns_a_reused_buffer_returns_the_last_microbatch_for_all() -> None:
    x, _ = _data()
    torch.manual_seed(0)
    model = Reuses()
    with torch.no_grad():
        expected = torch.cat([model(part).clone() for part in x.split(2)])
        output = theirs.ScheduleGPipe(theirs.PipelineStage(model, 0, 1, CPU), MICROBATCHES).eval(x)
        assert torch.equal(output, expected[-2:].repeat(MICROBATCHES, 1))
        pipe = ours.pipeline(model, (x[:2],), stages=1)

    def body(comm: Comm) -> Tensor:
        return ours.ScheduleGPipe(pipe.build_stage(0, comm=comm), MICROBATCHES).eval(x)

    assert torch.equal(InProcessWorld(1).run(body)[0], expected)


class Skips(nn.Module):
    """What the first stage makes goes to the last, and with ``twice`` to the second too."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        middle = self.b(h)
        return self.c(middle + h if self.twice else middle) + h


def _pipe(package: Any, model: nn.Module) -> Any:
    x, _ = _data()
    spec = {"b": package.SplitPoint.BEGINNING, "c": package.SplitPoint.BEGINNING}
    return package.pipeline(model, (x[:2],), split_spec=spec)


@pytest.mark.parametrize("twice", [False, True], ids=["over a stage", "to two later stages"])
def test_a_skip_under_an_interleaved_schedule_crashes(twice: bool) -> None:
    x, target = _data()
    torch.manual_seed(0)
    model, expected = Skips(twice), Skips(twice)
    expected.load_state_dict(model.state_dict())
    their_pipe = _pipe(theirs, copy.deepcopy(model))
    stages = [their_pipe.build_stage(number, CPU) for number in range(3)]
    with pytest.raises(RuntimeError, match="not connected"):  # it sends to itself
        theirs.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=functional.mse_loss).step(
            x, target=target
        )
    pipe = _pipe(ours, model)

    def body(comm: Comm) -> None:
        numbers = ((0, 2), (1,))[comm.rank]  # 3 stages on 2 ranks
        own_stages = [pipe.build_stage(number, comm=comm) for number in numbers]
        ours.ScheduleInterleaved1F1B(own_stages, MICROBATCHES, functional.mse_loss).step(x, target=target)

    InProcessWorld(2).run(body)
    _uncut([expected])
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad)
