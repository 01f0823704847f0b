"""Does a pipeline take the time that the simulator says, in real processes, beside torch's own schedules?

``partita bench pipeline-makespan``. One process a rank over gloo on this machine. Stages do not compute,
they sleep: F 10 ms, B 20 ms, I and W 10 ms each, so that more ranks than cores measure what the runtime
costs, and not the machine; uneven stages 1, 0.5 and 1.5 times as long in turn. What a pass takes without any
runtime is a little more (timers, autograd, the operator), so each rank measures passes first, all ranks at
once, and the simulator is given these times. Both sides run the same stages in turn; a step lasts from a
barrier to the end of the slowest rank.

Zero bubble with stages that Inductor has compiled: F, I and W are those of a compiled stage alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import pipelining as theirs
from torch.nn import functional

from benchmarks.compiled_pipeline import middle_stage, stage_passes
from benchmarks.harness import MIN_ROUNDS, Ratio, first_line, ratio, write_json
from benchmarks.ranks import on_ranks, timed
from benchmarks.sleepers import WIDTH, Sleeper, sleepers
from partita.pipelining import SplitPoint, get_schedule_class, pipeline
from partita.planning import Schedule, StageCost, get_schedule, simulate
from partita.runtime import ProcessGroupComm

__all__ = ["Row", "main", "measure"]

_ONE_STAGE = ("GPipe", "1F1B")
_COMPILED = ("InterleavedZeroBubble", "ZBVZeroBubble")
_NAMES = (*_ONE_STAGE, "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_BARE_PASSES = 9
_UNEVEN = (1.0, 0.5, 1.5)
_LIMIT_S = 600.0
_TORCH_LIMIT_S = 120.0
"""Of one operation of torch's schedules: where one rank fails, the others wait for it."""


@dataclass(frozen=True)
class Row:
    """One schedule on so many ranks.

    Attributes:
        compiled: the backend that has compiled the stages; None where they are not.
        uneven: whether stages take unlike times.
        forward_ms: what F takes without a runtime, median of the stages.
        backward_ms: likewise B.
        nominal_s: the simulator's makespan for passes that take exactly what they sleep.
        simulated_s: the simulator's makespan for the measured passes, for links that take no time.
        ours: the measured step over that, round by round.
        theirs: the same for torch; None where torch does not run it.
        theirs_failed: why not.
    """

    schedule: str
    ranks: int
    microbatches: int
    compiled: str | None
    uneven: bool
    forward_ms: float
    backward_ms: float
    nominal_s: float
    simulated_s: float
    ours: Ratio
    theirs: Ratio | None
    theirs_failed: str


def main(*, quick: bool = False, json_path: Path | None = None, console: Console | None = None) -> list[Row]:
    """Measure every schedule on 4 and 8 ranks, and with uneven stages on 4, and zero bubble compiled and not
    on 2 and 4; print a table, and write JSON where a path is given.

    Args:
        quick: one schedule on two ranks, few and short microbatches, one round: whether it runs, not how
            fast.
    """
    console = console or Console()
    cases: list[_Case] = [_Case(name, ranks) for ranks in (4, 8) for name in _NAMES]
    cases += [_Case(name, 4, uneven=True) for name in _NAMES]
    cases += [_Case(name, 2) for name in _COMPILED]
    cases += [_Case(name, ranks, "inductor") for ranks in (2, 4) for name in _COMPILED]
    if quick:
        names = "ZBVZeroBubble", 2
        cases = [_Case(*names), _Case(*names, uneven=True), _Case(*names, "aot_eager")]
    rows = []
    for case in cases:
        console.print(f"{case.title} on {case.ranks} ranks", style="dim")
        size = (4, 0.002, 1) if quick else (32, 0.010, MIN_ROUNDS)
        rows.append(measure(case.name, case.ranks, *size, compiled=case.compiled, uneven=case.uneven))
    table = Table("schedule", "ranks", "F, B, ms", "simulated, s", "here / simulated", "torch / simulated")
    for case, row in zip(cases, rows, strict=True):
        other = str(row.theirs) if row.theirs is not None else row.theirs_failed
        passes = f"{row.forward_ms:.1f}, {row.backward_ms:.1f}"
        simulated = f"{row.simulated_s:.3f} ({row.nominal_s:.3f} if passes took what they sleep)"
        table.add_row(case.title, str(row.ranks), passes, simulated, str(row.ours), other)
    console.print(table)
    write_json(json_path, "pipeline_makespan", rows)
    return rows


@dataclass(frozen=True)
class _Case:
    name: str
    ranks: int
    compiled: str | None = None
    uneven: bool = False

    @property
    def title(self) -> str:
        return ", ".join([self.name, *filter(None, [self.compiled, "uneven" if self.uneven else None])])


def measure(
    name: str,
    ranks: int,
    microbatches: int,
    unit_s: float,
    rounds: int,
    *,
    compiled: str | None = None,
    uneven: bool = False,
) -> Row:
    """Measure one schedule: F takes ``unit_s``, B twice as long, I and W as long each."""
    plan = _plan(name, ranks, microbatches)
    units = tuple(unit_s * (_UNEVEN[stage % len(_UNEVEN)] if uneven else 1) for stage in range(plan.stages))
    timings: _Timings = on_ranks(ranks, _LIMIT_S, _body, name, microbatches, units, rounds, compiled)
    simulated = simulate(plan, timings.costs).makespan_s
    theirs_ok = len(timings.theirs) == rounds
    return Row(
        name,
        ranks,
        microbatches,
        compiled,
        uneven,
        1e3 * statistics.median(cost.forward_s for cost in timings.costs),
        1e3 * statistics.median(cost.backward_s for cost in timings.costs),
        simulate(plan, [StageCost(unit, 2 * unit, unit, unit) for unit in units]).makespan_s,
        simulated,
        ratio(timings.ours, [simulated] * rounds),
        ratio(timings.theirs, [simulated] * rounds) if theirs_ok else None,
        timings.failed,
    )


def _plan(name: str, ranks: int, microbatches: int) -> Schedule:
    return get_schedule(name)(ranks * (1 if name in _ONE_STAGE else 2), microbatches, ranks)


# --- processes ---


@dataclass
class _Timings:
    """Seconds of each round, and what the passes of each stage take without a runtime."""

    costs: list[StageCost]
    ours: list[float]
    theirs: list[float]
    failed: str = ""


def _body(
    comm: ProcessGroupComm,
    name: str,
    microbatches: int,
    units: tuple[float, ...],
    rounds: int,
    compiled: str | None,
) -> _Timings:
    plan = _plan(name, comm.size, microbatches)
    ours = _ours(name, plan, comm.rank, comm, units, compiled)
    other, failed = None, ""
    try:
        other = _theirs(name, plan, comm.rank, units, compiled)
    except RuntimeError as error:  # on all ranks alike
        failed = first_line(error)
    comm.barrier()
    alone = {unit: _bare(unit) if compiled is None else _alone(unit, compiled) for unit in sorted({*units})}
    of_ranks = comm.all_gather_object(alone)
    costs = [of_ranks[rank][unit] for rank, unit in zip(plan.stage_ranks, units, strict=True)]
    timings = _Timings(costs, [], [], failed)
    for number in range(rounds + 1):
        seconds = timed(comm, ours)
        if number:
            timings.ours.append(seconds)
        if other is None or timings.failed:
            continue
        try:
            seconds = timed(comm, other)
        except Exception as error:  # on one rank; the others' time is over then
            timings.failed = first_line(error)
            continue
        if number:
            timings.theirs.append(seconds)
    return timings


def _bare(unit_s: float) -> StageCost:
    """Medians of a few passes of one stage, as a plain loop runs them."""
    stage = Sleeper(unit_s)
    taken: dict[str, list[float]] = {"F": [], "B": [], "I": [], "W": []}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = work()
        taken[what].append(time.monotonic() - started)
        return result

    for _ in range(_BARE_PASSES):
        x = torch.zeros(1, WIDTH, requires_grad=True)
        y = timed("F", partial(stage, x))
        seed = torch.ones_like(y)
        timed("B", partial(torch.autograd.backward, y, seed, retain_graph=True))
        for what, leaf in (("I", x), ("W", stage.weight)):
            timed(what, partial(torch.autograd.grad, y, leaf, seed, retain_graph=True))
    f, b, i, w = (statistics.median(taken[what]) for what in "FBIW")
    return StageCost(f, b, i, w)


def _alone(unit_s: float, compiled: str) -> StageCost:
    """Medians of a few passes of a compiled stage between two others, alone in this process."""
    x = torch.zeros(1, WIDTH, requires_grad=True)
    stage = middle_stage(lambda: Sleeper(unit_s), x, compiled)
    rounds = [stage_passes(stage, x) for _ in range(1 + _BARE_PASSES)][1:]
    f, b, i, w = (statistics.median(one[what] for one in rounds) for what in "FBIW")
    return StageCost(f, b, i, w)


def _ours(
    name: str,
    plan: Schedule,
    rank: int,
    comm: ProcessGroupComm,
    units: tuple[float, ...],
    compiled: str | None,
) -> Callable[[], object]:
    model = sleepers(units)
    spec = {str(number): SplitPoint.END for number in range(plan.stages - 1)}
    pipe = pipeline(model, (torch.zeros(1, WIDTH),), split_spec=spec)
    stages = [pipe.build_stage(stage, comm=comm) for stage in _stages_of(plan, rank)]
    if compiled is not None:
        for stage in stages:
            stage.compile(compiled)
    schedule = get_schedule_class(name)(stages, plan.microbatches, functional.mse_loss)
    x = torch.zeros(plan.microbatches, WIDTH)
    return lambda: schedule.step(x, target=x)


def _theirs(
    name: str, plan: Schedule, rank: int, units: tuple[float, ...], compiled: str | None
) -> Callable[[], object]:
    device, group = torch.device("cpu"), dist.new_group(timeout=timedelta(seconds=_TORCH_LIMIT_S))

    def module(stage: int) -> Any:
        sleeper = Sleeper(units[stage])
        return sleeper if compiled is None else torch.compile(sleeper, backend=compiled)

    stages = [
        theirs.PipelineStage(module(stage), stage, plan.stages, device, group=group)
        for stage in _stages_of(plan, rank)
    ]
    kind = theirs.schedules.get_schedule_class(name)
    schedule: Any = kind(
        stages[0] if name in _ONE_STAGE else stages,
        plan.microbatches,
        loss_fn=functional.mse_loss,
    )
    x = torch.zeros(plan.microbatches, WIDTH)
    args = (x,) if plan.stage_ranks[0] == rank else ()
    kwargs = {"target": x} if plan.stage_ranks[-1] == rank else {}
    return lambda: schedule.step(*args, **kwargs)


def _stages_of(plan: Schedule, rank: int) -> list[int]:
    return [stage for stage, holder in enumerate(plan.stage_ranks) if holder == rank]
