"""Calls of two threads on one comm: each took the other's messages for its own, and waited without end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from partita.errors import ExecutionError
from partita.pipelining import PipelineStage, ScheduleGPipe
from partita.runtime import Comm, InProcessWorld
from partita.runtime.one_at_a_time import one_at_a_time, without_other_ranks


def test_calls_of_one_thread_may_be_parts_of_each_other_and_follow_those_of_another() -> None:
    def body(comm: Comm) -> None:
        with one_at_a_time(comm, "generate()"), one_at_a_time(comm, "run_programs()"):
            pass
        with ThreadPoolExecutor(1) as threads, one_at_a_time(comm, "eval()"):
            threads.submit(_enter, comm).result()

    with pytest.raises(ExecutionError, match=r"run step\(\) in thread .*, while its eval\(\) is under way"):
        InProcessWorld(1).run(body)


def _enter(comm: Comm, stages: Sequence[nn.Module] = ()) -> None:
    with one_at_a_time(comm, "step()", stages):
        pass


def test_a_stage_that_two_schedules_share_runs_for_one_of_them_at_a_time() -> None:
    stage = nn.Linear(1, 1)

    def body(comm: Comm) -> None:
        with ThreadPoolExecutor(1) as threads, one_at_a_time(comm, "eval()", [stage]):
            other = InProcessWorld(1)
            with pytest.raises(
                ExecutionError, match=r"run step\(\) in thread .*, while its eval\(\) is under"
            ):
                threads.submit(other.run, _enter, [stage]).result()

    InProcessWorld(1).run(body)


def test_a_call_within_a_step_is_refused_where_other_ranks_are_in_the_step() -> None:
    def body(comm: Comm) -> None:
        x = torch.zeros(2, 3)

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            assert schedule.eval(x) is None
            return functional.mse_loss(output, target)

        stage = PipelineStage(nn.Linear(3, 3), comm.rank, comm.size, torch.device("cpu"), comm=comm)
        schedule = ScheduleGPipe(stage, 1, loss_fn)
        schedule.step(x, target=x)

    with pytest.raises(ExecutionError, match=r"rank 1 is to run eval\(\) number 0 .* within its step\(\)"):
        InProcessWorld(2).run(body)


def test_a_pass_that_begins_while_another_threads_step_runs_ends_the_pipeline() -> None:
    def body(comm: Comm) -> None:
        x = torch.zeros(2, 3)

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1, "evaluates") as threads:
                threads.submit(schedule.eval, x).result()
            return functional.mse_loss(output, target)

        stage = PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu"), comm=comm)
        schedule = ScheduleGPipe(stage, 1, loss_fn)
        schedule.step(x, target=x)

    with pytest.raises(ExecutionError, match=r"run eval\(\) number 0 .* 'evaluates_0', while its step\(\)"):
        InProcessWorld(1).run(body)


def test_what_a_rank_does_by_itself_refuses_calls_and_the_others_do_not_hear_of_it() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            with (
                without_other_ranks(comm, "trial"),
                pytest.raises(ExecutionError, match=r"to run step\(\) within its trial"),
            ):
                _enter(comm)
            with one_at_a_time(comm, "step()"), without_other_ranks(comm, "trial") as free:
                assert not free
                _enter(comm)
        comm.barrier()

    InProcessWorld(2).run(body)
