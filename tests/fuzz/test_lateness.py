"""A rank that is late, or stopped for a while, is waited for: nobody takes it for dead."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from tests.runtime.worlds import endings, patience
from torch import nn
from torch.nn import functional

from partita.pipelining import PipelineStage, Schedule1F1B
from partita.runtime import Comm

LONG = bool(os.environ.get("PARTITA_FUZZ_EXAMPLES"))
STEPS, EVENTS = (2000, 12) if LONG else (60, 3)
LATE_S, STOPPED_S = (20.0, 7.0) if LONG else (2.5, 1.5)
LIMIT_S = 170.0 + EVENTS * max(LATE_S, STOPPED_S)


def _late_or_stopped(draw: random.Random) -> None:
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0.0, LATE_S))
        return
    seconds, own = draw.uniform(0.0, STOPPED_S), os.getpid()
    if not os.fork():
        os.kill(own, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)


def _train(comm: Comm, seed: int) -> int:
    torch.set_num_threads(1)
    plan = random.Random(seed)
    events = {(plan.randrange(STEPS), plan.randrange(comm.size)) for _ in range(EVENTS)}
    stage = PipelineStage(nn.Linear(4, 4), comm.rank, comm.size, torch.device("cpu"), comm=comm)
    schedule = Schedule1F1B(stage, 4, functional.mse_loss)
    draw, batch = random.Random(seed + comm.rank), torch.randn(8, 4)
    for step in range(STEPS):
        if (step, comm.rank) in events:
            _late_or_stopped(draw)
        schedule.step(*([batch] if stage.is_first else []), target=batch)
    return len(events)


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.dear), 3])
def test_nobody_is_taken_for_dead(ranks: int) -> None:
    with patience(LIMIT_S):
        found = endings(ranks, _train, ranks)
    assert [(ending.error, ending.text) for ending in found] == [(None, "")] * ranks
