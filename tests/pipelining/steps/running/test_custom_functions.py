"""Functions in the place of a kind of action: a step with them is a step without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelining.running import assert_equal, errors_of
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs
from torch.nn import functional

from partita.errors import ScheduleError
from partita.pipelining import PipelineStage, schedules
from partita.pipelining.schedules import ScheduleDualPipeV, _PipelineContext, _PipelineScheduleRuntime
from partita.planning import Action, ActionKind
from partita.runtime import Comm, InProcessWorld

TEXT = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
LOWERED = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)
Functions = dict[Any, Callable[..., None]]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return self.linear(x) if factor is None else self.linear(x) * factor


def _stages(comm: Comm, placement: Sequence[int] = (0, 1)) -> list[PipelineStage]:
    torch.manual_seed(0)
    layers = [_Layer() for _ in placement]
    return [
        PipelineStage(layers[index], index, len(placement), "cpu", comm=comm)
        for index, rank in enumerate(placement)
        if rank == comm.rank
    ]


def _loaded(path: Path, stages: list[PipelineStage]) -> _PipelineScheduleRuntime:
    schedule = _PipelineScheduleRuntime(stages, 2, functional.mse_loss)
    schedule._load_csv(path, format="compute_comms" if "SEND" in path.read_text() else "compute_only")
    return schedule


def _step(schedule: Any, rank: int) -> list[Tensor]:
    """Arguments where the first stage is, targets where the last one is."""
    x, losses = torch.arange(16.0).reshape(4, 4), []
    named = {} if rank else {"factor": torch.full((4, 1), 2.0)}
    ends = {"target": x.neg(), "losses": losses} if schedule._num_stages - 1 in schedule.stages else {}
    schedule.step(*([] if rank else [x]), **named, **ends)
    return [loss.detach() for loss in losses]


def _run(
    make: Callable[[list[PipelineStage]], Any],
    functions: Callable[[list[Any]], Functions],
    placement: Sequence[int] = (0, 1),
) -> Any:
    """Losses and gradients, and what the functions noted, by rank."""

    def body(comm: Comm) -> Any:
        stages, notes = _stages(comm, placement), []
        schedule = make(stages)
        for kind, function in functions(notes).items():
            schedule.register_custom_function(kind, function)
        losses = _step(schedule, comm.rank)
        return (losses, [it.grad for stage in stages for it in stage.submod.parameters()]), notes

    ends = InProcessWorld(max(placement) + 1).run(body)
    return [end[0] for end in ends], [end[1] for end in ends]


def _around(notes: list[Any], action: Action, ctx: _PipelineContext) -> None:
    ctx.run(action)
    notes.append(str(action))


@pytest.mark.parametrize("text", [TEXT, LOWERED])
def test_a_function_is_called_for_each_action_of_its_kind_in_order(text: str, tmp_path: Path) -> None:
    (tmp_path / "order").write_text(text)
    make = partial(_loaded, tmp_path / "order")
    expected, _ = _run(make, lambda notes: {})
    for kind, calls in (
        (schedules.FORWARD, [["0F0", "0F1"], ["1F0", "1F1"]]),
        (theirs.FULL_BACKWARD, [["0B0", "0B1"], ["1B0", "1B1"]]),
    ):
        results, notes = _run(make, lambda notes, kind=kind: {kind: partial(_around, notes)})
        assert_equal(results, expected)
        assert notes == calls


def test_a_function_is_given_what_the_step_was_given(tmp_path: Path) -> None:
    (tmp_path / "order").write_text(TEXT)

    def look(action: Action, ctx: _PipelineContext) -> None:
        schedule, number = ctx.schedule_ref, action.microbatch_index
        x, last = torch.arange(16.0).reshape(4, 4).chunk(2)[number], schedule.rank == 1
        assert isinstance(schedule, _PipelineScheduleRuntime)
        assert action.stage_index == schedule.rank
        assert len(ctx.arg_mbs) == len(ctx.kwarg_mbs) == 2
        assert_equal(ctx.arg_mbs[number], () if last else (x,))
        assert_equal(ctx.kwarg_mbs[number], {} if last else {"factor": torch.full((2, 1), 2.0)})
        assert_equal(ctx.target_mbs and ctx.target_mbs[number], x.neg() if last else None)
        assert ctx.losses == ([] if last else None)
        ctx.run(action)

    make = partial(_loaded, tmp_path / "order")
    assert_equal(_run(make, lambda notes: {"F": look})[0], _run(make, lambda notes: {})[0])


def test_passes_that_overlap_are_one_action_whose_parts_are_run_in_any_order() -> None:
    def make(stages: list[PipelineStage]) -> ScheduleDualPipeV:
        return ScheduleDualPipeV(stages, 4, functional.mse_loss)

    def functions(notes: list[Any]) -> Functions:
        def backward_first(action: Action, ctx: _PipelineContext) -> None:
            notes.append(action)
            for part in reversed(action.sub_actions or ()):
                ctx.run(part)

        return {schedules.OVERLAP_F_B: backward_first, "F": partial(_around, notes)}

    placement = (0, 1, 1, 0)
    results, notes = _run(make, functions, placement)
    assert_equal(results, _run(make, lambda notes: {}, placement)[0])
    for row in notes:
        together = [action for action in row if isinstance(action, Action)]
        inside = {str(part) for action in together for part in action.parts}
        assert together
        assert not inside & {text for text in row if isinstance(text, str)}


def test_actions_on_whole_stages_are_added_where_a_function_wants_them(tmp_path: Path) -> None:
    (tmp_path / "order").write_text(TEXT)
    make = partial(_loaded, tmp_path / "order")

    def functions(notes: list[Any]) -> Functions:
        note = lambda action, ctx: notes.append(str(action))  # noqa: E731
        return dict.fromkeys(("UNSHARD", "RESHARD", "REDUCE_GRAD"), note)

    results, notes = _run(make, functions)
    assert_equal(results, _run(make, lambda notes: {})[0])
    assert notes == [[f"{rank}UNSHARD", f"{rank}REDUCE_GRAD", f"{rank}RESHARD"] for rank in range(2)]
    (tmp_path / "order").write_text(LOWERED)  # kept as it is
    assert _run(make, functions)[1] == [[], ["1UNSHARD"]]


def test_in_evaluation_only_forward_passes_are_there(tmp_path: Path) -> None:
    (tmp_path / "order").write_text(TEXT)

    def body(comm: Comm) -> list[Any]:
        notes: list[Any] = []
        schedule = _loaded(tmp_path / "order", _stages(comm))
        for kind in ("F", "B", "REDUCE_GRAD"):
            schedule.register_custom_function(ActionKind(kind), partial(_around, notes))
        schedule.eval(*([] if comm.rank else [torch.ones(4, 4)]))
        return notes

    assert InProcessWorld(2).run(body) == [["0F0", "0F1"], ["1F0", "1F1"]]


def _none(action: Action, ctx: _PipelineContext) -> None:
    pass


def _twice(action: Action, ctx: _PipelineContext) -> None:
    ctx.run(action)
    ctx.run(action)


def _another(action: Action, ctx: _PipelineContext) -> None:
    ctx.run(Action(action.stage, ActionKind.B, action.microbatch))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_none, r"for 0F0 returns without having run 0F0: call ctx\.run\(action\)"),
        (_twice, r"for 0F0 runs 0F0, which has been run already: run each of its actions once \(0F0\)"),
        (_another, r"for 0F0 runs 0B0, which is not part of it"),
    ],
)
def test_a_pass_is_run_once_or_the_step_fails(function: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "order").write_text("0F0,0B0\n")

    def body(comm: Comm) -> None:
        stages = _stages(comm, (0,))
        schedule = _PipelineScheduleRuntime(stages, 1, functional.mse_loss)
        schedule._load_csv(tmp_path / "order")
        schedule.register_custom_function(schedules.FORWARD, function)
        _step(schedule, 0)

    (error,) = errors_of(1, body)
    with pytest.raises(ScheduleError, match=message):
        raise error


def test_what_can_not_have_a_function_and_what_is_replaced() -> None:
    def body(comm: Comm) -> None:
        schedule = ScheduleDualPipeV(_stages(comm, (0, 0)), 2, functional.mse_loss)
        for kind in (schedules.SEND_F, "VIT"):
            with pytest.raises(
                ScheduleError, match=r"can't have a custom function: register one for F, I, W"
            ):
                schedule.register_custom_function(kind, _none)
        schedule.register_custom_function(schedules.W, _twice)
        with pytest.warns(UserWarning, match="custom function for W is replaced"):
            schedule.register_custom_function(schedules.W, _none)

    InProcessWorld(1).run(body)
    with pytest.raises(ScheduleError, match=r"0F0 can't be run outside of a step"):
        _PipelineContext(None).run(Action(0, ActionKind.F, 0))
