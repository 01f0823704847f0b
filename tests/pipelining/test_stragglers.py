"""A rank that never comes is an error on every rank that says who is where, within seconds where it can be
known that nobody will come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.worlds import endings, patience
from torch import Tensor, nn

from partita.ddp import replicate
from partita.errors import ScheduleError, SignatureMismatch
from partita.pipelining import (
    GradScaler,
    PipelineStage,
    Schedule1F1B,
    SplitPoint,
    clip_grad_norm_,
    pipeline,
    save_checkpoint,
)
from partita.runtime import Comm, InProcessWorld

KNOWN_IN_S = 10.0
"""A ring of waits is looked for after two seconds; the rest is for a busy machine."""


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _schedule(comm: Comm | None = None) -> tuple[Any, Any]:
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"), comm=comm)
    return stage, Schedule1F1B(stage, 2, _loss)


def _step(schedule: Any) -> None:
    schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


def _one_saves(comm: Comm, folder: str) -> None:
    stage, schedule = _schedule()
    if comm.rank == 0:
        save_checkpoint(folder, stage)
    _step(schedule)


def _crossed(comm: Comm, folder: str) -> None:
    schedules = [_schedule()[1], _schedule()[1]]
    for place in (0, 1) if comm.rank == 0 else (1, 0):
        _step(schedules[place])


def _one_clips(comm: Comm, folder: str) -> None:
    _, schedule = _schedule()
    _step(schedule)
    if comm.rank == 0:
        clip_grad_norm_(schedule, 1.0)
    _step(schedule)


def _one_scales(comm: Comm, folder: str) -> None:
    _, schedule = _schedule()
    if comm.rank == 1:
        GradScaler(schedule, "cpu")
    _step(schedule)


def _forward_against_step(comm: Comm, folder: str) -> None:
    _, schedule = _schedule()
    model = replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.ones(4, 4)).sum().backward()
    if comm.rank == 0:
        model(torch.ones(4, 4))
    else:
        _step(schedule)


CASES = {
    _crossed: ("step() number 0 of Schedule1F1B", "step() number 0 of Schedule1F1B"),
    _one_clips: ("clipping gradients", "step() number 1 of Schedule1F1B"),
    _one_scales: ("step() number 0 of Schedule1F1B", "making a gradient scaler"),
    _forward_against_step: (
        "the forward pass of a replicated module",
        "step() number 0 of Schedule1F1B",
    ),
    # The last one, for a comm that one rank alone has begun to make is never made.
    _one_saves: ("saving or loading a checkpoint", "step() number 0 of Schedule1F1B"),
}


def _all_of(comm: Comm, folder: str) -> dict[str, tuple[str, str, float]]:
    torch.set_num_threads(1)
    said = {}
    for body in CASES:
        started = time.monotonic()
        try:
            body(comm, f"{folder}/{body.__name__}")
        except Exception as error:
            said[body.__name__] = type(error).__name__, str(error), time.monotonic() - started
        comm.barrier()
    return said


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    with patience(120.0):
        yield


@pytest.fixture(scope="module")
def said(_patience: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    ends = endings(2, _all_of, str(tmp_path_factory.mktemp("checkpoints")))
    assert [ending.text for ending in ends] == ["", ""]
    return [ending.result for ending in ends]


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_ranks_that_wait_for_each_other_are_told_where_both_are(said: list[Any], body: Any) -> None:
    places = CASES[body]
    for results in said:
        kind, text, seconds = results[body.__name__]
        assert kind == "DeadlockError", text
        assert f"rank 0 is in {places[0]} and waits for rank 1" in text
        assert f"rank 1 is in {places[1]} and waits for rank 0" in text
        assert seconds < KNOWN_IN_S


def _save_when_the_other_has_ended(comm: Comm, folder: Path) -> Any:
    stage, schedule = _schedule()
    _step(schedule)
    if comm.rank == 1:
        return None
    started = time.monotonic()
    try:
        save_checkpoint(folder, stage)
    except Exception as error:
        return type(error).__name__, str(error).partition(":")[0], time.monotonic() - started


def test_a_rank_that_has_ended_in_order_is_told_apart_from_one_that_died(tmp_path: Path) -> None:
    kind, text, seconds = endings(2, _save_when_the_other_has_ended, tmp_path)[0].result
    assert (kind, text) == (
        "PeerFailed",
        "rank 1 left while another rank still waited for it in saving or loading a checkpoint",
    )
    assert seconds < KNOWN_IN_S


class _Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _other_model(comm: Comm, frontend: str) -> str:
    pipe = pipeline(
        _Wide(8 + comm.rank),
        (torch.ones(2, 4),),
        split_spec={"second": SplitPoint.BEGINNING},
        frontend=frontend,
    )
    try:
        Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2, _loss)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _other_models(comm: Comm) -> list[str]:
    return [_other_model(comm, frontend) for frontend in ("export", "modules")]


def test_a_layer_that_is_wider_in_another_ranks_part_is_refused_on_all_ranks() -> None:
    for ending in endings(2, _other_models):
        assert ending.error is None, ending.text
        for text in ending.result:
            assert text == (
                "SignatureMismatch: ranks 0 and 1 have cut different models: second.0.weight: float32[8, 4] "
                "on rank 0, and second.0.weight: float32[9, 4] on rank 1. Build the same model on every rank"
            )


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_of_another_size_is_an_error_with_both_shapes_on_the_rank_that_has_it() -> None:
    with pytest.raises(SignatureMismatch, match=r"output of shape \[2, 4\] and its target of shape \[3, 4\]"):
        InProcessWorld(2).run(_step_with_wrong_target)


def _step_with_wrong_target(comm: Comm) -> None:
    stage = PipelineStage(nn.Linear(4, 4), comm.rank, 2, torch.device("cpu"), comm=comm)
    schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
    schedule.step(torch.ones(4, 4), target=torch.ones(6, 4))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _two_schedules(comm: Comm) -> None:
    pipe = pipeline(_Tied(), (torch.ones(2, 4),), split_spec={"second": SplitPoint.BEGINNING})
    stage = pipe.build_stage(comm.rank, comm=comm)
    first = Schedule1F1B(stage, 2, _loss)
    Schedule1F1B(stage, 2, _loss, tied_gradients="reduced")
    _step(first)


def test_a_stage_that_follows_another_schedule_now_is_refused() -> None:
    """Its messages were those of the other schedule: a KeyError, deep in the step."""
    with pytest.raises(ScheduleError, match="was given to another schedule since, with other tied_gradients"):
        InProcessWorld(2).run(_two_schedules)
