"""How much Python does a pipeline's runtime cost per action, beside torch's own schedules?

``partita bench pipeline-overhead``. CPU time of a whole ``step()`` on each of four ranks in turn, over
torch's fake process group (nothing is sent, nobody waits), with stages of one tiny linear layer, a few steps
in a row; less the time of the same forward and whole backward passes in a plain loop; divided by the number
of actions. An action is an F, B, I, W, or a send or receive, which is how torch counts. Of stages that
``torch.compile`` has compiled (``aot_eager``) it is what goes beyond the same compiled layers in a loop.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701 - made for this

from benchmarks.harness import MIN_ROUNDS, Ratio, in_turn, ratio, write_json
from partita.pipelining import Pipe, SplitPoint, get_schedule_class, pipeline
from partita.pipelining.schedules import PipelineSchedule
from partita.planning import Schedule, get_schedule
from partita.runtime import Handle, ProcessGroupComm
from partita.runtime.comms._starter import Starter  # noqa: PLC2701
from partita.runtime.comms.waiters import Waiters

__all__ = ["Row", "main", "measure"]

_WIDTH = 4
_RANKS = 4
_STEPS = 10
"""In a row, so that what is measured is a training that runs, and not one step after a garbage collection."""
_ROUNDS = 3 * MIN_ROUNDS
"""Short ones: this measures microseconds, and a machine's speed drifts."""
_STAGES_PER_RANK = {"GPipe": 1, "1F1B": 1}
_NAMES = (
    *("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"),
    *("DualPipeV", "InterleavedZeroBubble", "ZBVZeroBubble"),
)
_COMPILED = ("1F1B", "ZBVZeroBubble")
"""Measured with compiled stages too: a schedule of whole backward passes, and one of passes in halves."""


@dataclass(frozen=True)
class Row:
    """One schedule: microseconds of Python an action, over all ranks; medians of rounds.

    Attributes:
        compiled: whether the stages are.
        actions: of all ranks in one step.
        theirs_us: torch's; None where it refuses.
        gain: torch's over ours, round by round; likewise.
    """

    schedule: str
    compiled: bool
    ranks: int
    stages: int
    microbatches: int
    actions: int
    ours_us: float
    theirs_us: float | None
    gain: Ratio | None


def main(*, quick: bool = False, json_path: Path | None = None, console: Console | None = None) -> list[Row]:
    """Measure every schedule, print a table, and write JSON where a path is given.

    Args:
        quick: two schedules, few microbatches and one round: whether it runs, not how fast.
    """
    console = console or Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        names = ("1F1B", "ZBVZeroBubble") if quick else _NAMES
        microbatches, rounds = (8, 1) if quick else (32, _ROUNDS)
        rows = [measure(name, microbatches, rounds) for name in names]
        rows += [measure(name, microbatches, rounds, compiled=True) for name in _COMPILED]
    finally:
        torch.set_num_threads(threads)
    table = Table("schedule", "actions", "here, µs an action", "torch, µs an action", "torch / here")
    for row in rows:
        name = f"{row.schedule}, compiled" if row.compiled else row.schedule
        theirs = "refuses" if row.theirs_us is None else f"{row.theirs_us:.1f}"
        table.add_row(name, str(row.actions), f"{row.ours_us:.1f}", theirs, str(row.gain or ""))
    console.print(table)
    write_json(json_path, "pipeline_overhead", rows)
    return rows


def measure(name: str, microbatches: int, rounds: int, *, compiled: bool = False) -> Row:
    """Measure one schedule."""
    stages = _RANKS * _STAGES_PER_RANK.get(name, 2)
    layers: list[nn.Module] = [nn.Linear(_WIDTH, _WIDTH) for _ in range(stages)]
    example = torch.randn(1, _WIDTH)
    spec = {str(number): SplitPoint.END for number in range(stages - 1)}
    options: dict[str, Any] = {"compile": "aot_eager"} if compiled else {}
    pipe = pipeline(nn.Sequential(*layers), (example,), split_spec=spec, **options)
    if compiled:
        layers = [torch.compile(layer, backend="aot_eager") for layer in layers]  # type: ignore[misc]
    both = not compiled or name in _STAGES_PER_RANK  # torch can't split a compiled stage's backward pass
    plan = get_schedule(name)(stages, microbatches, _RANKS)
    x, target = torch.randn(microbatches, _WIDTH), torch.randn(microbatches, _WIDTH)
    taken: dict[str, list[list[float]]] = {"ours": [], "bare": [], **({"theirs": []} if both else {})}
    actions = 0
    for rank in range(_RANKS):
        with _fake_world(rank, _RANKS) as group:
            ours = _ours(name, pipe, plan, rank, microbatches, group)
            actions += sum(len(action.parts) or 1 for action in ours.schedule().actions(rank))
            subjects = {
                "ours": _repeated(partial(ours.step, x, target=target)),
                "bare": _repeated(_bare(layers, plan, rank, example)),
            }
            if both:
                other = _theirs(name, layers, plan, rank, microbatches, example)
                subjects["theirs"] = _repeated(_their_step(other, plan, rank, x, target))
            for run in subjects.values():  # a compiler compiles, and guards are seen to hold
                run()
            for side, seconds in in_turn(subjects, rounds=rounds, clock=time.thread_time).items():
                taken[side].append(seconds)
    totals = {side: [sum(of_rank) for of_rank in zip(*parts, strict=True)] for side, parts in taken.items()}
    overhead = {
        side: [
            1e6 * (whole - bare) / (actions * _STEPS)
            for whole, bare in zip(totals[side], totals["bare"], strict=True)
        ]
        for side in totals
        if side != "bare"
    }
    return Row(
        name,
        compiled,
        _RANKS,
        stages,
        microbatches,
        actions,
        statistics.median(overhead["ours"]),
        statistics.median(overhead["theirs"]) if both else None,
        ratio(overhead["theirs"], overhead["ours"]) if both else None,
    )


def _repeated(step: Callable[[], object]) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(_STEPS):
            step()

    return steps


@contextmanager
def _fake_world(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


class _FakeComm(ProcessGroupComm):
    """The comm of real runs over a group that sends nothing: it makes up what other ranks would send."""

    def __init__(self, group: dist.ProcessGroup, stage_ranks: tuple[int, ...]) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timedelta(seconds=60)
        self.name = "fake"
        self._closed = False
        self._process = os.getpid()
        self.launched = {}
        self._unsent = deque()
        self.waiters = Waiters()
        self.collectives = set()
        detector: Any = SimpleNamespace(failure=None, began={})
        no_groups: Any = None
        self._detector = detector
        self._starter = Starter(self, no_groups, detector, self._check_usable, use_nccl=False)
        self._starter.data = group
        self._stage_ranks = stage_ranks
        self._trailers: dict[int, Tensor] = {}
        self._last_sent = torch.empty(0)

    def all_gather_object(self, obj: Any) -> list[Any]:
        stages_by_rank = [
            tuple(stage for stage, rank in enumerate(self._stage_ranks) if rank == number)
            for number in range(self.size)
        ]
        stages, *rest = obj
        if stages != stages_by_rank[self.rank]:  # about a step or its data, in which all ranks are alike
            return [obj] * self.size
        return [(stages, *rest) for stages in stages_by_rank]

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        if not tag:
            self._last_sent = tensor
        return super().send(tensor, dst, tag)

    def recv(self, buffer: Tensor, src: int, tag: int = 0) -> Handle:
        handle = super().recv(buffer, src, tag)
        return handle if tag else _Echo(self, buffer)

    def recv_together(self, buffers: Sequence[Tensor], src: int, tags: Sequence[int]) -> Handle:
        trailer = buffers[-1]
        if id(trailer) not in self._trailers:  # which is received into again and again
            self._trailers[id(trailer)] = trailer.fill_(1)  # all values lie plainly
        return super().recv_together(buffers, src, tags)

    def echo(self, buffer: Tensor) -> None:
        """Answer what this rank has sent, and that each microbatch has one sample."""
        buffer.fill_(1)
        buffer[0] = self._last_sent[0]

    def fail(self, error: BaseException, where: str) -> None:
        """There is no other rank that could learn of it."""


class _Echo:
    def __init__(self, comm: _FakeComm, buffer: Tensor) -> None:
        self._comm = comm
        self._buffer = buffer

    def wait(self) -> None:
        self._comm.echo(self._buffer)


def _ours(
    name: str, pipe: Pipe, plan: Schedule, rank: int, microbatches: int, group: dist.ProcessGroup
) -> PipelineSchedule:
    comm = _FakeComm(group, plan.stage_ranks)
    stages = [pipe.build_stage(stage, comm=comm) for stage in _stages_of(plan, rank)]
    return get_schedule_class(name)(stages, microbatches, functional.mse_loss)


class _TheirStage(theirs.PipelineStage):
    """Skips the exchange of shapes, as if all other stages knew theirs."""

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)


def _theirs(
    name: str, layers: Sequence[nn.Module], plan: Schedule, rank: int, microbatches: int, example: Tensor
) -> Any:
    device = torch.device("cpu")
    stages = [
        _TheirStage(
            layers[stage],
            stage,
            plan.stages,
            device,
            input_args=example.clone().requires_grad_(stage > 0),
            output_args=example.clone().requires_grad_(),
        )
        for stage in _stages_of(plan, rank)
    ]
    kind = theirs.schedules.get_schedule_class(name)
    own_stages = stages[0] if name in _STAGES_PER_RANK else stages
    return kind(own_stages, microbatches, loss_fn=functional.mse_loss)


def _their_step(schedule: Any, plan: Schedule, rank: int, x: Tensor, target: Tensor) -> Callable[[], object]:
    args = (x,) if plan.stage_ranks[0] == rank else ()
    kwargs = {"target": target} if plan.stage_ranks[-1] == rank else {}
    return lambda: schedule.step(*args, **kwargs)


def _bare(layers: Sequence[nn.Module], plan: Schedule, rank: int, example: Tensor) -> Callable[[], object]:
    """The same passes without a runtime: whole backward passes, also where the schedule cuts them."""
    own_stages, last = _stages_of(plan, rank), plan.stages - 1
    gradient = torch.ones_like(example)

    def run() -> None:
        for _ in range(plan.microbatches):
            for stage in own_stages:
                value = layers[stage](example.detach().requires_grad_(stage > 0))
                if stage == last:
                    torch.autograd.backward(functional.mse_loss(value, gradient))
                else:
                    torch.autograd.backward(value, gradient)

    return run


def _stages_of(plan: Schedule, rank: int) -> list[int]:
    return [stage for stage, holder in enumerate(plan.stage_ranks) if holder == rank]
