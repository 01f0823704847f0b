"""Training that is killed at any moment, and goes on from the newest checkpoint in another cut."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from tests.pipelining.resuming import CASE, MICROBATCHES, optimizer_for, pipe_of, state_of, train_whole, whole
from tests.runtime.worlds import Ending, endings, patience
from torch import nn

from partita.errors import PeerFailed
from partita.pipelining import Pipe, get_schedule_class, load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints import Snapshots, latest_checkpoint
from partita.runtime import Comm

CUTS = (
    ("GPipe", (0, 1)),
    ("GPipe", (0, 1, 2)),
    ("1F1B", (0, 1)),
    ("1F1B", (0, 1, 2)),
    ("LoopedBFS", (0, 1, 0, 1)),
    ("Interleaved1F1B", (0, 1, 0, 1)),
    ("InterleavedZeroBubble", (0, 1, 0, 1)),
    ("ZBVZeroBubble", (0, 1, 1, 0)),
    ("DualPipeV", (0, 1, 1, 0)),
)
STEPS = 30
State = dict[str, bytes]
"""Of each parameter and buffer, what lies in memory."""
SAMPLES = 2 * MICROBATCHES


@dataclass(frozen=True)
class Leg:
    """A part of a training.

    Attributes:
        placement: the rank of each stage.
        victim: the rank that is killed; None: it comes to its end.
        after_s: its first step.
    """

    schedule: str
    placement: tuple[int, ...]
    victim: int | None = None
    after_s: float = 0.0


@dataclass(frozen=True)
class Training:
    """Legs, one after the other, each in another cut than the one before.

    Attributes:
        saving: after each step, in the step or beside it.
    """

    seed: int
    legs: tuple[Leg, ...]
    saving: Literal["save_checkpoint", "Snapshots"]

    @classmethod
    def drawn(cls, seed: int) -> Training:
        """That of a seed."""
        draw = random.Random(seed)
        first, second, last = draw.sample(CUTS, 3)
        killed = [
            Leg(*cut, victim=draw.randrange(max(cut[1]) + 1), after_s=draw.uniform(0.0, 0.8))
            for cut in (first, second)
        ]
        saving: Any = draw.choice(("save_checkpoint", "Snapshots"))
        return cls(seed, (*killed, Leg(*last)), saving)

    def __str__(self) -> str:
        return f"{self.seed}: " + " to ".join(leg.schedule for leg in self.legs) + f", {self.saving}"


def _train(comm: Comm, leg: Leg, saving: str, pipe: Pipe, folder: Path) -> State:
    torch.set_num_threads(1)
    stages = [pipe.build_stage(n, comm=comm) for n, rank in enumerate(leg.placement) if rank == comm.rank]
    # one, since stages of one rank may share a tied parameter
    optimizer = optimizer_for(nn.ModuleList(stage.module for stage in stages))
    schedule = get_schedule_class(leg.schedule)(stages, MICROBATCHES, CASE.loss)
    latest, first = latest_checkpoint(folder), 0
    if latest is not None:
        first = load_checkpoint(latest, stages, optimizer).extra["step"]
    with Snapshots(folder, keep=2) as snapshots:
        for step in range(first, STEPS):
            args, kwargs, target = CASE.data(SAMPLES, seed=10 + step)
            if 0 not in (stage.index for stage in stages):
                args, kwargs = (), {}
            schedule.step(*args, target=target, **kwargs)
            if step == first and comm.rank == leg.victim:
                threading.Timer(leg.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            optimizer.step()
            optimizer.zero_grad()
            extra = {"step": step + 1}
            if saving == "Snapshots":
                snapshots.save(step + 1, stages, optimizer, extra=extra)
            else:
                save_checkpoint(folder / f"step-{step + 1}", stages, optimizer, extra=extra)
    if leg.victim is not None:
        comm.barrier()
        comm.recv_object((comm.rank + 1) % comm.size)  # it was over before the kill came
    return _numbers(stages)


@lru_cache(maxsize=1)
def _expected() -> State:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks: sums of several threads differ in their last bits
    try:
        trained = whole()
        train_whole(trained, 0, STEPS)
    finally:
        torch.set_num_threads(threads)
    return _numbers(trained[0])


def _numbers(stages: Sequence[Any]) -> State:
    return {name: value.numpy().tobytes() for name, value in state_of(stages).items()}


def check(training: Training) -> None:
    """Let it happen, and assert that the weights are those of a training that nobody disturbed."""
    with tempfile.TemporaryDirectory() as folder, patience(120.0):
        for leg in training.legs:
            pipe = pipe_of(len(leg.placement))
            ranks = max(leg.placement) + 1
            found = endings(ranks, _train, leg, training.saving, pipe, Path(folder))
            for rank, ending in enumerate(found):
                _check_ending(leg, rank, ending)
    expected = _expected()
    state = {name: value for ending in found for name, value in ending.result.items()}
    assert state.keys() == expected.keys()
    assert not [name for name, value in state.items() if value != expected[name]]


def _check_ending(leg: Leg, rank: int, ending: Ending) -> None:
    where = f"{leg}: rank {rank}"
    if leg.victim is None:
        assert not ending.text, f"{where}: {ending.text}"
    elif rank == leg.victim:
        assert ending.exitcode == -signal.SIGKILL, f"{where} was to be killed: {ending}"
    else:
        assert isinstance(ending.error, PeerFailed), f"{where} was told {ending.error!r}"
        assert ending.error.rank == leg.victim, f"{where} was told {ending.error!r}"
