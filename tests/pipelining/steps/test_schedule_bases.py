"""Orders of actions from a subclass or a file: equal to the schedules that have them built in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelining.running import assert_equal, errors_of
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs
from torch.nn import functional

from partita.errors import ScheduleError, SignatureMismatch
from partita.pipelining import PipelineStage, get_schedule_class, schedules
from partita.pipelining.schedules import (
    PipelineSchedule,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from partita.planning import get_schedule
from partita.runtime import Comm, InProcessWorld

Make = Callable[[list[PipelineStage]], PipelineSchedule]
TEXT = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
LOWERED = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def _stages(comm: Comm, placement: Sequence[int]) -> list[PipelineStage]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in placement]
    count = len(placement)
    return [
        PipelineStage(layers[index], index, count, "cpu", comm=comm)
        for index, rank in enumerate(placement)
        if rank == comm.rank
    ]


def _run(make: Make, placement: Sequence[int] = (0, 1)) -> Any:
    """Losses and gradients of two steps and an evaluation, by rank."""

    def body(comm: Comm) -> Any:
        stages = _stages(comm, placement)
        schedule = make(stages)
        x, y, losses, kept = torch.ones(4, 4), torch.zeros(4, 4), [], []
        for call in (schedule.step, schedule.step, schedule.eval):
            call(x, target=y, losses=losses)
            kept.append([loss.detach() for loss in losses])
        return kept, [parameter.grad for stage in stages for parameter in stage.submod.parameters()]

    return InProcessWorld(max(placement) + 1).run(body)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


class Sequential(PipelineScheduleSingle):
    def _get_pipeline_order(self) -> Any:
        n, last = self.n_microbatches, self._num_stages - 1
        forward = [[f"{rank}F{m}" for m in range(n)] for rank in range(last + 1)]
        backward = [[f"{rank}B{m}" for m in range(n)] for rank in range(last + 1)]
        return {rank: [*forward[rank], *backward[rank]] for rank in range(last + 1)}


class Filled(PipelineScheduleMulti):
    """Fills the order as torch's users do, with torch's own actions."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for rank, row in enumerate(TEXT.splitlines()):
            self.pipeline_order[rank] = [theirs._Action.from_str(cell) for cell in row.split(",")]


class Given(_PipelineScheduleRuntime):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        F, B = schedules.F, schedules.B  # noqa: N806 - as in torch
        action = schedules._Action
        order = {
            0: [action(0, F, 0), action(0, F, 1), action(0, B, 0), action(0, B, 1)],
            1: [action(1, F, 0), action(1, B, 0), action(1, F, 1), action(1, B, 1)],
        }
        self._prepare_schedule_with_comms(order)


class Loaded(_PipelineScheduleRuntime):
    def __init__(self, path: Path, format: str, *args: Any) -> None:  # noqa: A002 - torch's
        super().__init__(*args)
        self._load_csv(str(path), format=format)


def test_bases_are_bases_as_in_torch() -> None:
    assert _PipelineSchedule is PipelineSchedule
    for name in theirs.__all__:
        there, here = getattr(theirs, name), getattr(schedules, name)
        if isinstance(there, type):
            for base in ("PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime"):
                expected = issubclass(there, getattr(theirs, base))
                assert issubclass(here, getattr(schedules, base)) == expected, (name, base)


def test_bases_are_found_by_name_as_in_torch() -> None:
    for name in ("PipelineScheduleSingle", "pipelineschedulemulti"):
        assert get_schedule_class(name).__name__ == theirs.get_schedule_class(name).__name__


def test_orders_of_ones_own_are_run(tmp_path: Path) -> None:
    expected = _run(lambda stages: Schedule1F1B(stages[0], 2, _loss))
    (tmp_path / "plain.csv").write_text(TEXT)
    (tmp_path / "lowered.csv").write_text(LOWERED)
    for kind in (Sequential, Filled, Given):
        assert_equal(_run(lambda stages, kind=kind: kind(stages, 2, _loss)), expected, kind.__name__)
    for name, form in (("plain", "compute_only"), ("lowered", "compute_comms")):
        path = tmp_path / f"{name}.csv"
        results = _run(lambda stages, path=path, form=form: Loaded(path, form, stages, 2, _loss))
        assert_equal(results, expected, name)


@pytest.mark.parametrize(
    ("kind", "placement"), [(ScheduleInterleaved1F1B, (0, 1, 0, 1)), (ScheduleZBVZeroBubble, (0, 1, 1, 0))]
)
def test_a_file_written_by_one_schedule_is_loaded_by_another(
    kind: type[PipelineScheduleMulti], placement: Sequence[int], tmp_path: Path
) -> None:
    def write(stages: list[PipelineStage]) -> PipelineSchedule:
        schedule = kind(stages, 4, _loss)
        for form in ("compute_only", "compute_comms"):
            schedule._dump_csv(tmp_path / form, form)
        return schedule

    expected = _run(write, placement)
    for form in ("compute_only", "compute_comms"):
        make = lambda stages, form=form: Loaded(tmp_path / form, form, stages, 4, _loss)  # noqa: E731
        assert_equal(_run(make, placement), expected)


def test_the_order_can_be_read_and_not_changed_in_place() -> None:
    def body(comm: Comm) -> None:
        (stage,) = _stages(comm, (0, 1))
        schedule = ScheduleGPipe(stage=stage, n_microbatches=2, loss_fn=_loss)
        assert [str(action) for action in schedule.pipeline_order[0] if action] == [
            "0F0",
            "0F1",
            "0B0",
            "0B1",
        ]
        assert "0SEND_F0" in map(str, schedule.pipeline_order_with_comms[0])
        assert schedule.stage_index_to_group_rank == {0: 0, 1: 1}
        assert (schedule.rank, schedule.pp_group_size, schedule._stage) == (comm.rank, 2, stage)
        with pytest.raises(TypeError):
            schedule.pipeline_order[0] = []

    InProcessWorld(2).run(body)


def test_an_order_that_is_set_later_is_run_from_then_on() -> None:
    def make(stages: list[PipelineStage]) -> PipelineSchedule:
        schedule = ScheduleGPipe(stages, 2, _loss)
        generated = get_schedule("1F1B")(2, 2, 2)
        schedule.pipeline_order = dict(enumerate(generated.rows))
        assert schedule.schedule().compute_only().rows == generated.compute_only().without_idle().rows
        return schedule

    assert_equal(_run(make), _run(lambda stages: Schedule1F1B(stages, 2, _loss)))


def test_another_loss_function_can_be_set() -> None:
    def make(stages: list[PipelineStage]) -> PipelineSchedule:
        schedule = Schedule1F1B(stages, 2, lambda output, target: output.sum())
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        for stage in stages:
            stage.submod.zero_grad()
        schedule.loss_fn = _loss
        return schedule

    losses = [kept for kept, _ in _run(make)]
    assert_equal(losses, [kept for kept, _ in _run(lambda stages: Schedule1F1B(stages, 2, _loss))])


def _of(kind: Callable[..., Any], then: Callable[[Any], Any], ranks: int = 2) -> list[BaseException | None]:
    def body(comm: Comm) -> None:
        then(kind(_stages(comm, tuple(range(ranks))), 2, _loss))

    return errors_of(ranks, body)


def test_what_has_no_actions_yet_says_what_to_call() -> None:
    errors = _of(_PipelineScheduleRuntime, lambda schedule: schedule.step(torch.ones(4, 4)), ranks=1)
    assert isinstance(errors[0], ScheduleError)
    assert "has no actions yet: call _load_csv(path), or fill pipeline_order" in str(errors[0])


@pytest.mark.parametrize(
    ("text", "form", "message"),
    [
        (TEXT, "both", "format is 'both': give 'compute_only' or 'compute_comms'"),
        (LOWERED, "compute_only", "has sends and receives: load it with format='compute_comms'"),
        ("1F0,1B0\n0F0,0B0\n", "compute_only", "stage 1"),
        ("0F0,0B0\n1F0,1B0\n", "compute_only", "microbatch 1"),
        (TEXT + "2F0\n", "compute_only", "there is no rank 2: the pipeline has 2"),
        ("0F0,nonsense\n", "compute_only", "'nonsense' is not an action"),
    ],
)
def test_files_that_can_not_be_run_are_refused(text: str, form: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    errors = _of(_PipelineScheduleRuntime, lambda schedule: schedule._load_csv(path, form))
    assert all(isinstance(error, ScheduleError) and message in str(error) for error in errors), errors


def test_ranks_that_load_different_files_hear_of_it(tmp_path: Path) -> None:
    (tmp_path / "0").write_text(TEXT)
    (tmp_path / "1").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")

    def body(comm: Comm) -> None:
        schedule = _PipelineScheduleRuntime(_stages(comm, (0, 1)), 2, _loss)
        schedule._load_csv(tmp_path / str(comm.rank))
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))

    errors = errors_of(2, body)
    assert all(isinstance(error, SignatureMismatch) for error in errors), errors
    assert "of _PipelineScheduleRuntime" in str(errors[0]) or "of PipelineScheduleRuntime" in str(errors[0])


def test_a_base_alone_and_steps_of_ones_own_are_refused() -> None:
    errors = _of(PipelineScheduleSingle, lambda _: None, ranks=1)
    assert "PipelineScheduleSingle is the base of schedules for one stage a rank" in str(errors[0])
    with pytest.raises(ScheduleError, match="Own defines _step_microbatches, which nothing calls here: give"):
        type("Own", (ScheduleGPipe,), {"_step_microbatches": lambda self: None})
