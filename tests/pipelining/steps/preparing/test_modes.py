"""The modes that a step is made in."""

from __future__ import annotations

import copy

import torch
from tests.pipelining.models import PLAIN
from tests.pipelining.running import cut, errors_of

from partita.errors import ExecutionError, PeerFailed
from partita.pipelining import ScheduleGPipe
from partita.runtime import Comm


def test_a_step_that_one_rank_makes_in_inference_mode_is_refused_on_all() -> None:
    """It said that no parameter is trained, and to unfreeze one."""
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        schedule = ScheduleGPipe(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, PLAIN.loss)
        args, kwargs, target = PLAIN.data(8)
        with torch.inference_mode(comm.rank == 0):
            schedule.step(*args, target=target, **kwargs)

    first, second = errors_of(2, body)
    assert isinstance(first, ExecutionError)
    assert isinstance(second, PeerFailed)
    for error in (first, second):
        assert "step() under torch.inference_mode() has no gradients: leave the block" in str(error)
