"""Stages that run the model's own code: what comes out is what the whole model gives, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.pipelining.blocks_models import (
    RIGHT,
    WIDTH,
    Blocks,
    Cache,
    CountsBehind,
    Drawn,
    Normed,
    Recomputed,
    ToList,
    WithLoss,
    WritesToArgument,
    WritesToView,
)
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from partita import verify
from partita.errors import CaptureError, ExecutionError
from partita.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from partita.pipelining.frontends.modules.pipe import ModulePipe
from partita.runtime import Comm, InProcessWorld

SPEC = {"blocks.1": SplitPoint.BEGINNING, "blocks.2": SplitPoint.BEGINNING, "head": SplitPoint.BEGINNING}
MICROBATCHES = 4


def _model(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _x(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def _cut(model: nn.Module, **options: Any) -> ModulePipe:
    _seed(0)  # which blocks are left out decides what is seen to cross
    pipe = pipeline(model, (_x(3, 0),), split_spec=SPEC, frontend="modules", **options)
    assert isinstance(pipe, ModulePipe)
    return pipe


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Cache):
        return value.items
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _loss(output: Any, target: Any = None) -> Tensor:
    terms = [(t * torch.linspace(0, 1, t.numel()).view(t.shape)).sum() for t in _tensors(output)]
    return torch.stack(terms).sum()


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _call(module: nn.Module, x: Tensor, seed: int) -> list[Any]:
    """Output, gradients and what all generators draw next."""
    _seed(seed)
    x = x.clone().requires_grad_()
    output = module(x)
    _loss(output).backward()
    return [type(output), *_tensors(output), x.grad, torch.rand(1), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_a_local_call_is_the_whole_models_call(make: type[nn.Module]) -> None:
    model = _model(make)
    whole, pipe = copy.deepcopy(model), _cut(model)
    for number in range(3):
        for mode in (True, False):
            whole.train(mode)
            pipe.train(mode)
            x = _x(3 + number, 10 + number)
            assert_equal(_call(pipe, x, number), _call(whole, x, number), f"{number} {mode}")
            for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
                assert_equal(mine.grad, its.grad)
            assert_equal(list(model.buffers()), list(whole.buffers()))


def _steps(
    kind: Any, placement: Sequence[Sequence[int]], make: type[nn.Module]
) -> tuple[dict[str, Any], list[float]]:
    def body(comm: Comm) -> Any:
        pipe = _cut(_model(make))
        stages = [pipe.build_stage(index, comm=comm) for index in placement[comm.rank]]
        schedule = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, _loss)
        losses: list[Tensor] = []
        for number in range(2):
            schedule.step(_x(12, number), losses=losses, return_outputs=False)
        gradients = {
            name: value.grad
            for stage in stages
            for name, value in stage.module.named_parameters(remove_duplicate=False)
        }
        buffers = {name: value for stage in stages for name, value in stage.module.named_buffers()}
        return gradients | buffers, [loss.item() for loss in losses]

    results = InProcessWorld(len(placement)).run(body)
    state = {name: value for state, _ in results for name, value in state.items()}
    return state, next(losses for _, losses in results if losses)


PLACEMENTS = {
    ScheduleZBVZeroBubble: [[0, 3], [1, 2]],
    ScheduleInterleavedZeroBubble: [[0, 2], [1, 3]],
}


@pytest.mark.parametrize(
    ("make", "kind"),
    [  # a quarter of them in every check
        pytest.param(make, kind, marks=[pytest.mark.dear] if (row + column) % 4 else [])
        for row, make in enumerate(RIGHT)
        for column, kind in enumerate(PLACEMENTS)
    ],
    ids=lambda value: value.__name__,
)
def test_steps_of_any_schedule_are_the_whole_models(make: type[nn.Module], kind: Any) -> None:
    state, losses = _steps(Schedule1F1B, [[0], [1], [2], [3]], make)
    others, also = _steps(kind, PLACEMENTS[kind], make)
    assert_equal(others, state, kind.__name__)
    assert also == losses
    if make is Drawn:
        return  # a pipeline's random numbers follow its own rule
    whole = _model(make)
    for number in range(2):
        expected = []
        for part in _x(12, number).chunk(MICROBATCHES):
            loss = _loss(whole(part))
            (loss / MICROBATCHES).backward()
            expected.append(loss.item())
    assert losses == expected
    for name, value in whole.named_parameters(remove_duplicate=False):
        assert_equal(state[name], value.grad, name)
    for name, buffer in whole.named_buffers():
        assert_equal(state[name], buffer, name)


def test_labels_go_in_and_the_models_own_loss_comes_out() -> None:
    model, x, labels = _model(WithLoss), _x(4, 1), torch.tensor([0, -1, 2, 1])
    pipe = pipeline(
        model,
        (x,),
        {"labels": labels},
        split_spec=SPEC,
        frontend="modules",
        loss_spec={"loss": True, "out": False},
    )
    whole = copy.deepcopy(model)
    other = torch.tensor([-1, -1, 3, 0])
    expected = whole(x, labels=other)
    expected["loss"].backward()
    actual = pipe(x, labels=other)
    assert_equal(actual["loss"], expected["loss"].detach())
    with torch.no_grad():
        assert pipe(x)["loss"] is None
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert_equal(mine.grad, its.grad)


def test_stages_are_planned_and_hold_their_own_state_only() -> None:
    model = _model(Normed)
    pipe = pipeline(model, (_x(3, 0),), stages=3, frontend="modules")
    assert pipe.plan is not None
    assert pipe.num_stages == len(pipe.plan.stages) == 3
    names = [set(pipe.get_stage_module(index).state_dict()) for index in range(3)]
    assert set().union(*names) == set(model.state_dict())
    assert sum(map(len, names)) == len(model.state_dict())
    again = pipeline(model, (_x(3, 0),), plan=pipe.plan, frontend="modules")
    assert [set(again.get_stage_module(index).state_dict()) for index in range(3)] == names
    assert_equal(pipe.eval()(_x(5, 1)), copy.deepcopy(model).eval()(_x(5, 1)))


def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    first, other = _model(Normed), _model(Normed)
    pipe = _cut(first)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    pipe(_x(3, 1))
    save_checkpoint(tmp_path / "saved", [pipe.get_stage_module(index) for index in range(4)])
    recut = pipeline(other, (_x(3, 0),), split_spec={"blocks.2": SplitPoint.END}, frontend="modules")
    load_checkpoint(tmp_path / "saved", [recut.get_stage_module(index) for index in range(2)])
    assert_equal(dict(other.state_dict()), dict(first.state_dict()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (CountsBehind, "output 0 differs in call 2 of the example. Its first call was equal: see that no"),
        (Recomputed, r"the cut at 'blocks\.1' lies within torch\.utils\.checkpoint"),
    ],
)
def test_what_a_cut_would_change_is_refused(make: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        _cut(_model(make))


@pytest.mark.parametrize("border", ["blocks.1", "blocks.2"])
def test_a_write_to_memory_that_another_stage_has_too_is_refused(border: str) -> None:
    """In the last stage it went unseen: when forward has returned, the model has let go of the tensor."""
    with pytest.raises(CaptureError, match="stage 1 writes to one of two tensors in one memory"):
        pipeline(
            _model(WritesToView),
            (_x(3, 0),),
            split_spec={border: SplitPoint.BEGINNING},
            frontend="modules",
        )


def test_a_write_to_an_argument_behind_a_cut_is_refused_in_a_step() -> None:
    """The caller would not see it. It went unseen where the model had let go of the argument."""
    pipe = pipeline(
        _model(WritesToArgument),
        (_x(3, 0),),
        split_spec={"blocks.2": SplitPoint.BEGINNING},
        frontend="modules",
    )
    x = _x(3, 1)
    pipe(x)
    assert_equal(x, _x(3, 1) * 2)
    with pytest.raises(ExecutionError, match="stage 1 writes to argument 0"):
        InProcessWorld(2).run(
            lambda comm: ScheduleGPipe([pipe.build_stage(comm.rank, comm=comm)], 1).eval(
                *([_x(3, 1)] if comm.rank == 0 else [])
            )
        )


class Hidden(Blocks):
    """Keeps a value where no variable shows it, and uses it only where data says so."""

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        h = cache.update(self.blocks[0](x))
        for block in self.blocks[1:]:  # type: ignore[index]
            h = block(h)
        return self.head(h + cache.items[0] if x.sum() > 0 else h)


def test_a_value_that_the_example_did_not_need_is_missed_by_name() -> None:
    model = _model(Hidden)
    pipe = pipeline(model, (-_x(3, 0).abs(),), split_spec=SPEC, frontend="modules")
    assert_equal(pipe(-_x(3, 1).abs()), copy.deepcopy(model)(-_x(3, 1).abs()))
    with pytest.raises(
        ExecutionError, match=r"add\(\) .*, uses a tensor \(float32\[3, 4\]\) that an earlier"
    ):
        pipe(_x(3, 1).abs())


def test_what_several_examples_need_is_found_by_each_of_them() -> None:
    pipe = _cut(_model(ToList))
    for seed in range(20):
        assert_equal(_tensors(pipe(_x(2, seed))), _tensors(_model(ToList)(_x(2, seed))), str(seed))


class ReturnsArguments(nn.Module):
    """Returns what it was given beside what it made, as models do with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        return {"y": self.b(self.a(x)), "given": [mask, (x,)], "rows": len(x)}


def test_an_argument_that_comes_back_is_the_callers_own() -> None:
    model, x, mask = ReturnsArguments(), torch.randn(2, 4), torch.ones(2)
    pipe = pipeline(model, (x, mask), split_spec={"a": SplitPoint.END}, frontend="modules")
    returned = pipe(x, mask)
    assert returned["given"][0] is mask
    assert returned["given"][1][0] is x
    assert verify(pipe, model, (x, mask)).ok


def test_what_a_profiler_reads_is_not_the_models_way() -> None:
    """With stacks torch's profiler reads the gradients of a module's parameters when it first sees a call of
    it. Here, as where one rank alone is profiled, it has seen the last stage before and the first one not.
    """
    pipe = pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        (torch.randn(2, 4),),
        split_spec={"1": SplitPoint.BEGINNING},
        frontend="modules",
    )
    x, last = torch.randn(2, 4), pipe.get_stage_module(1)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True):
        expected = pipe(x)
        assert torch.equal(copy.deepcopy(pipe, {id(last): last})(x), expected)


class _TakesThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        same = 2.0 if x is y else 1.0
        hidden = self.first(x) * same
        return self.second(hidden * y) + z


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_that_is_given_twice_is_one_tensor_on_every_stage(first: int) -> None:
    """The later stages had one for each argument, and the model seemed to go another way. What the example
    has shown to be unused of one argument is handed on where it is another one too.
    """
    model = _TakesThree()
    example = tuple(torch.randn(3, 2, WIDTH).unbind())
    pipe = pipeline(model, example, split_spec={"second": SplitPoint.BEGINNING}, frontend="modules")
    x, z = torch.randn(2, 2, WIDTH).unbind()
    args = (x, x, z) if first == 0 else (z, x, x)
    x.requires_grad_()
    pipe(*args).sum().backward()
    gradient, x.grad = x.grad, None
    model(*args).sum().backward()
    assert_equal([gradient, pipe(*args)], [x.grad, model(*args)])
