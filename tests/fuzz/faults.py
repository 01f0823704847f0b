"""Random faults, each from a seed: which rank fails, when and how, in what work; what the others are told."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tests.runtime.hosts import FIRST_ADDRESS, hosts_on_a_switch, set_cable
from tests.runtime.worlds import Ending, endings_of, patience, reserved_port
from torch import nn
from torch.nn import functional

from partita.ddp import replicate
from partita.errors import PeerFailed
from partita.pipelining import PipelineStage, get_schedule_class, load_checkpoint, save_checkpoint
from partita.runtime import Comm, ProcessGroupComm

How = Literal["raise", "exit", "kill", "stop", "network"]
Work = Literal["pipeline", "replicas", "compiled replicas"]
During = Literal["training", "saving", "loading"]

PLACEMENTS = {
    "GPipe": ((0, 1), (0, 1, 2)),
    "1F1B": ((0, 1), (0, 1, 2)),
    "LoopedBFS": ((0, 1, 0, 1),),
    "Interleaved1F1B": ((0, 1, 0, 1), (0, 1, 2, 0, 1, 2)),
    "InterleavedZeroBubble": ((0, 1, 0, 1),),
    "ZBVZeroBubble": ((0, 1, 1, 0),),
    "DualPipeV": ((0, 1, 1, 0),),
}
MICROBATCHES = 6
TIMEOUT_S = 8.0
LOST_AFTER_S = 4.0
LIMIT_S: dict[How, float] = {
    **dict.fromkeys(("raise", "exit", "kill"), 5.0),
    "stop": TIMEOUT_S + 5.0,  # whether it goes on can't be known before
    "network": 16.0,  # a comm that a checkpoint makes has the limit that is so by itself, 15 s
}
_NET = 0x40000000
"""CLONE_NEWNET of ``setns(2)``."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        placement: the rank of each stage; of replicas, one each.
        width: of what crosses: small, or more than the system holds between two processes.
        after: steps, for a rank that raises or exits; seconds, for others.
    """

    seed: int
    how: How
    work: Work
    during: During
    schedule: str
    placement: tuple[int, ...]
    victim: int
    width: int
    after: float

    @classmethod
    def drawn(cls, seed: int, *, network: bool) -> Fault:
        """That of a seed, the same on every machine that can take a network down, or on every other."""
        draw = random.Random(seed)
        how = draw.choice(("raise", "exit", "kill", "kill", "stop", "network" if network else "kill"))
        work = draw.choice(("pipeline", "pipeline", "pipeline", "replicas", "compiled replicas"))
        during = draw.choice(("training", "training", "saving", "loading"))
        schedule = draw.choice(sorted(PLACEMENTS))
        placement = draw.choice(PLACEMENTS[schedule])
        if work != "pipeline":
            placement = draw.choice(((0, 1), (0, 1, 2)))
        if how in {"raise", "exit"}:
            during, after = "training", float(draw.randrange(1, 5))
        else:
            after = draw.uniform(0.0, 0.6)
        victim = draw.randrange(max(placement) + 1)
        return cls(seed, how, work, during, schedule, placement, victim, draw.choice((8, 8, 200_000)), after)

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    def __str__(self) -> str:
        work = self.schedule if self.work == "pipeline" else self.work
        return f"{self.seed}: rank {self.victim} of {self.ranks}, {self.how}, {self.during}, {work}"


@dataclass(frozen=True)
class Known:
    """What a rank was told, and when."""

    error: BaseException
    at_s: float


# In each rank's process.


def _rank(
    rank: int, size: int, path: str, started: float, pipe: Any, fault: Fault, port: int, hosts: list[str]
) -> None:
    torch.set_num_threads(1)
    folder = Path(path).parent
    address = "127.0.0.1"
    if hosts:
        address = FIRST_ADDRESS
        with open(f"/var/run/netns/{hosts[rank]}") as host:
            if ctypes.CDLL(None, use_errno=True).setns(host.fileno(), _NET):
                raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "cable" if hosts else "lo"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    store, limit = f"tcp://{address}:{port}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    try:
        with ProcessGroupComm.from_group(timeout_s=TIMEOUT_S, lost_after_s=LOST_AFTER_S) as comm:
            _work(comm, fault, folder)
    except Exception as error:
        pipe.send(Ending(0, result=Known(error, time.monotonic()), at_s=time.monotonic() - started))
    (folder / f"known {rank}").write_text("")
    if fault.how == "network":  # who ends is seen by the others, which are on this machine in truth
        _until_others_know(fault, folder)
    os._exit(0)


def _work(comm: Comm, fault: Fault, folder: Path) -> None:
    saved, modules, step = (_pipeline if fault.work == "pipeline" else _replica)(comm, fault)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in modules]
    step()
    save_checkpoint(folder / "first", saved, optimizers)
    comm.barrier()
    (folder / f"armed {comm.rank}").write_text("")
    fails = comm.rank == fault.victim
    if fails and fault.how in {"kill", "stop"}:
        threading.Timer(fault.after, _end_now, (fault, folder)).start()
    for number in itertools.count():
        if fault.during == "training":
            if fails and fault.how in {"raise", "exit"} and number == fault.after:
                _clock(folder)
                if fault.how == "exit":
                    sys.exit(3)
                raise ValueError("the samples are damaged")
            step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        elif fault.during == "saving":
            save_checkpoint(folder / str(number), saved, optimizers)
        else:
            load_checkpoint(folder / "first", saved, optimizers)


Saved = tuple[Any, list[nn.Module], Callable[[], None]]
"""What a checkpoint takes, the modules in it, and a step."""


def _pipeline(comm: Comm, fault: Fault) -> Saved:
    count, width = len(fault.placement), fault.width
    stages = []
    for index, rank in enumerate(fault.placement):
        if rank == comm.rank:
            module = _Layer(index, width if index < count - 1 else 1)
            stages.append(PipelineStage(module, index, count, torch.device("cpu"), comm=comm))
    schedule = get_schedule_class(fault.schedule)(stages, MICROBATCHES, functional.mse_loss)
    batch = torch.randn(2 * MICROBATCHES, 1)
    args = (batch,) if fault.placement[0] == comm.rank else ()
    target = batch if fault.placement[-1] == comm.rank else None
    return stages, [stage.module for stage in stages], lambda: schedule.step(*args, target=target)


class _Layer(nn.Module):
    """From any width to another, without much work."""

    def __init__(self, index: int, width: int) -> None:
        super().__init__()
        self.name, self.width = f"layer {index}", width
        self.add_module(self.name, nn.Linear(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x.mean(-1, keepdim=True)).repeat(1, self.width)


def _replica(comm: Comm, fault: Fault) -> Saved:
    module: Any = nn.Sequential(nn.Linear(8, fault.width), nn.ReLU(), nn.Linear(fault.width, 1))
    replica = replicate(module, comm, inner="aot_eager")
    run: Any = torch.compile(replica, backend="partita_ddp") if fault.work == "compiled replicas" else replica
    batch = torch.randn(4, 8)
    return replica, [replica], lambda: run(batch).square().mean().backward()


def _clock(folder: Path) -> None:
    (folder / "clock").write_text(str(time.monotonic()))


def _end_now(fault: Fault, folder: Path) -> None:
    if fault.how == "stop" and not os.fork():
        _until_others_know(fault, folder)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    _clock(folder)
    os.kill(os.getpid(), signal.SIGSTOP if fault.how == "stop" else signal.SIGKILL)


def _until_others_know(fault: Fault, folder: Path) -> None:
    others = [folder / f"known {rank}" for rank in range(fault.ranks) if rank != fault.victim]
    end, pause = time.monotonic() + LIMIT_S[fault.how] + 10, threading.Event()
    while not all(path.exists() for path in others) and time.monotonic() < end:
        pause.wait(0.05)


# In the test's.


def check(fault: Fault) -> None:
    """Let it happen, and assert that all others are told in time who failed."""
    with (
        reserved_port() as port,
        tempfile.TemporaryDirectory() as folder,
        hosts_on_a_switch(fault.ranks if fault.how == "network" else 0) as hosts,
        patience(60.0),
    ):
        if hosts:
            threading.Thread(target=_cut, args=(fault, Path(folder), hosts), daemon=True).start()
        found = endings_of(fault.ranks, _rank, fault, port, hosts, folder=folder)
        clock = Path(folder) / "clock"
        assert clock.exists(), f"it never came to that: {found}"
        failed_s = float(clock.read_text())
    for rank, ending in enumerate(found):
        if rank != fault.victim:
            _check_ending(fault, rank, ending, failed_s)


def _cut(fault: Fault, folder: Path, hosts: list[str]) -> None:
    pause = threading.Event()
    while not all((folder / f"armed {rank}").exists() for rank in range(fault.ranks)):
        pause.wait(0.01)
    pause.wait(fault.after)
    _clock(folder)
    set_cable(hosts[fault.victim], up=False)


def _check_ending(fault: Fault, rank: int, ending: Ending, failed_s: float) -> None:
    known = ending.result
    assert isinstance(known, Known), f"rank {rank} ended with {ending}"
    assert isinstance(known.error, PeerFailed), f"rank {rank} was told {known.error!r}"
    assert known.error.rank == fault.victim, f"rank {rank} was told {known.error!r}"
    late = known.at_s - failed_s - LIMIT_S[fault.how]
    assert late <= 0, f"rank {rank} knew {late:.1f} s too late"
