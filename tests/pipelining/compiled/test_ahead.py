"""What a step runs of compiled stages is compiled before its first action, and nothing else happens then."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pipelining.models import NORMED, PLAIN, SKIP, TRANSFORMER, WIDTH, Case, _Four
from tests.pipelining.running import cut, piped
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from partita.errors import NotCompiled
from partita.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    get_schedule_class,
    pipeline,
)
from partita.pipelining.schedules import CustomSchedule
from partita.pipelining.steps.running.instructions import Forward
from partita.planning import ActionKind, v_placement
from partita.runtime import Comm, InProcessWorld

Events = dict[int, list[str]]


class Results(_Four):
    """Its loss is its own; stages hand on tensors that lie oddly, sizes, and results without a gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first, second = self.a(x).chunk(2, -1)
        seen = [first.transpose(0, 1)]
        h = self.b(torch.cat((second, first), -1))
        seen.append(h.relu())
        h = self.c(h) + seen[0].transpose(0, 1).repeat(1, 2) * x.shape[0]
        return {"loss": functional.mse_loss(self.d(h), labels), "seen": seen[1], "first": seen[0]}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What each thread (a rank, as `InProcessWorld` runs them) does, in order."""
    by_thread: Events = {}
    run = Forward.run

    def noted(self: Forward) -> None:
        by_thread.setdefault(threading.get_ident(), []).append("F")
        run(self)

    monkeypatch.setattr(Forward, "run", noted)
    return by_thread


def _noting(events: Events) -> Callable[..., Any]:
    def compiler(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        events.setdefault(threading.get_ident(), []).append("compile")
        return gm.forward

    return compiler


def _assert_compiled_first(events: Events) -> None:
    assert any("compile" in done for done in events.values())  # of equal stages one rank compiles
    for done in events.values():
        assert "compile" not in done[done.index("F") :], done


def _one_step(runner: Any, _: Sequence[nn.Module], case: Case, __: Any) -> None:
    args, kwargs, target = case.data(8)
    runner.step(*args, target=target, **kwargs)
    runner.step(*args, target=target, **kwargs)


@pytest.mark.parametrize("kind", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("case", [PLAIN, TRANSFORMER, NORMED, SKIP], ids=lambda case: case.name)
def test_all_that_a_step_runs_is_compiled_before_its_first_action(
    case: Case, kind: str, events: Events
) -> None:
    placement = v_placement(4, 2) if kind == "ZBVZeroBubble" else None
    pipe = cut(case, 4, compile=_noting(events))
    piped(pipe, case, get_schedule_class(kind), 4, placement, _one_step)
    _assert_compiled_first(events)


def test_so_is_what_is_recomputed(events: Events) -> None:
    pipe = cut(TRANSFORMER, 4, compile=_noting(events), recompute=True)
    piped(pipe, TRANSFORMER, get_schedule_class("ZBVZeroBubble"), 4, v_placement(4, 2), _one_step)
    _assert_compiled_first(events)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_gradient_arrives_for_the_loss_and_for_what_later_stages_compute_with(
    stages: int, events: Events
) -> None:
    x, labels = torch.randn(2, 2, WIDTH)
    cuts = dict.fromkeys("abc"[4 - stages :], SplitPoint.END)
    pipe = pipeline(Results(), (x, labels), split_spec=cuts, compile=_noting(events))

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 4)
        schedule.step(x.repeat(4, 1), labels.repeat(4, 1))

    InProcessWorld(stages).run(body)
    _assert_compiled_first(events)


def test_sizes_that_change_are_compiled_ahead_too_and_so_is_evaluation(events: Events) -> None:
    pipe = cut(PLAIN, 2, compile=_noting(events))

    def body(comm: Comm) -> None:
        schedule = ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), 2, PLAIN.loss)
        for run, samples in ((schedule.step, 4), (schedule.step, 12), (schedule.eval, 4)):
            args, _, target = PLAIN.data(samples)
            run(*args, target=target)
            _assert_compiled_first({0: events.pop(threading.get_ident())})

    InProcessWorld(2).run(body)


def test_another_backend_is_compiled_ahead_too(events: Events) -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = ScheduleGPipe(stage, 2, PLAIN.loss)
        args, _, target = PLAIN.data(4)
        for _ in range(2):
            stage.compile(_noting(events))
            schedule.step(*args, target=target)
            _assert_compiled_first({0: events.pop(threading.get_ident())})

    InProcessWorld(2).run(body)


class Writes(nn.Module):
    """Draws, counts, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return functional.dropout(self.norm(self.layer(x.mul_(2)).relu()), 0.5)


def test_nothing_has_run_and_nothing_is_written() -> None:
    pipe = pipeline(Writes(), (torch.randn(4, WIDTH),), stages=1, compile="aot_eager")
    (stage,) = InProcessWorld(1).run(lambda comm: pipe.build_stage(0, comm=comm))
    x = torch.randn(4, WIDTH)
    before = [value.clone() for value in (*stage.module.state_dict().values(), x, torch.get_rng_state())]
    stage.begin(1)
    (name,) = stage.border.inputs
    stage.compile_ahead({name: x}, {ActionKind.F, ActionKind.B})
    after = [*stage.module.state_dict().values(), x, torch.get_rng_state()]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in stage.module.parameters())
    assert not stage.in_flight


class Notes(nn.Module):
    """Computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dim())
        return x


def _steps(modules: Sequence[nn.Module], samples: Sequence[int] = (4,)) -> None:
    def body(comm: Comm) -> None:
        stage = PipelineStage(modules[comm.rank], comm.rank, len(modules), torch.device("cpu"), comm=comm)
        stage.compile("aot_eager")
        schedule = ScheduleGPipe(stage, 2, functional.mse_loss)
        for number in samples:
            x = torch.randn(number, WIDTH)
            schedule.step(*(x,) * stage.is_first, target=x if stage.is_last else None)

    InProcessWorld(len(modules)).run(body)


def test_a_stage_that_computes_nothing_does_what_it_does_to_objects_once_a_microbatch() -> None:
    """No backend is called for it, and it ran ahead of the step too: its list was one too long."""
    notes = Notes()
    _steps([notes, nn.Linear(WIDTH, WIDTH)])
    assert notes.seen == [2, 2]


def test_nor_does_one_ahead_of_a_size_for_which_the_compiler_has_its_code() -> None:
    """Compiled for open sizes in the second step, it was not traced ahead of the third one, and ran."""
    notes = Notes()
    _steps([notes, nn.Linear(WIDTH, WIDTH)], (4, 8, 12, 16))
    assert notes.seen == [2] * 8


class Takes(nn.Linear):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return super().forward(x) * factor


def test_what_hooks_call_a_stage_with_is_not_guessed() -> None:
    """A step with such a stage raised a TypeError: the stage was called without the hook."""
    takes = Takes(WIDTH, WIDTH)
    takes.register_forward_pre_hook(lambda _, args: (*args, torch.ones(())))
    _steps([nn.Linear(WIDTH, WIDTH), takes])
    assert takes.weight.grad is not None


def test_passes_that_run_together_are_compiled_ahead_too(events: Events) -> None:
    pipe = cut(PLAIN, 2, compile=_noting(events))
    text = "0F0,0F1,,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1I1,1W1\n"

    def body(comm: Comm) -> None:
        args, _, target = PLAIN.data(4)
        stages = [pipe.build_stage(comm.rank, comm=comm)]
        CustomSchedule(stages, text, PLAIN.loss).step(*args, target=target)

    InProcessWorld(2).run(body)
    _assert_compiled_first(events)


class Breaks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_stage_that_is_refused_warns_once_and_runs_as_it_is() -> None:
    module = Breaks(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH)

    def body(comm: Comm) -> list[Any]:
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), comm=comm)
        stage.compile("aot_eager")
        schedule = ScheduleGPipe(stage, 2, functional.mse_loss)
        return [schedule.step(x, target=x) for _ in range(2)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (outputs,) = InProcessWorld(1).run(body)
    refused = [warning for warning in caught if warning.category is NotCompiled]
    assert len(refused) == 1
    assert "stage 0 runs uncompiled" in str(refused[0].message)
    assert all(torch.equal(output, functional.linear(x, module.weight, module.bias)) for output in outputs)


def _meets_while_it_compiles(comm: Comm, path: str) -> list[str]:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    events = ["cut"]

    def compiler(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        if events[-1] == "step":
            store.set(f"rank {comm.rank}", "compiles")
            store.wait([f"rank {1 - comm.rank}"], timedelta(seconds=15))
            events.append("met")
        return gm.forward

    args, _, target = PLAIN.data(8)
    stage = cut(PLAIN, 2, compile=compiler).build_stage(comm.rank, comm=comm)
    events.append("step")
    Schedule1F1B(stage, 4, PLAIN.loss).step(*args, target=target)
    return events


def test_all_ranks_compile_at_the_same_time(tmp_path: Path) -> None:
    """Each waits in its compiler for the other one's: where one compiled when the other's values came, they
    would wait for ever.
    """
    ends = endings(2, _meets_while_it_compiles, str(tmp_path / "store"))
    assert [(ending.error, ending.result) for ending in ends] == [(None, ["cut", "step", "met"])] * 2
