"""Does a training step take the time and the memory that the planner says, from costs that it has measured,
and how near is it to the best possible?

``partita bench prediction``. Two processes of one thread each over gloo on this machine train small models
under each schedule. Both measure the costs of the model's units at the same time, since in a step they share
the machine too, and what messages between them take. From these alone `plan_stages` cuts, and `simulate`
says how long the step takes; then the step is run. Costs are measured before and after the steps and
averaged. The weather of a shared machine changes between them by more than is asked about, so the uncut model
is run all the while, with each measurement of costs and around each step, and what is predicted is a step's
length in lengths of the uncut model. Memory is what tensors hold at most beyond parameters and gradients,
watched in a step of its own. The ideal step is half of what the uncut model takes, run by both processes at
the same time in turn with the steps, with the bubble of the best cut for messages that take nothing.

Then 2, 4 and 8 ranks whose stages sleep instead of computing, for equal and for unequal times: what a step
takes is the runtime's and the schedule's, and no core's, as long as ranks that wake up are run at once. On a
machine that others use: ``chrt -r 10 partita bench prediction --only 'asleep*'``. ``--only 'ResNet/*'``
measures one model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import MIN_ROUNDS, Ratio, chosen_cells, ratio, write_json
from benchmarks.prediction_models import MODELS
from benchmarks.ranks import timed
from benchmarks.sleeping_steps import SleepingRow, sleeping_rows
from benchmarks.two_ranks import (
    MICROBATCHES,
    RANKS,
    MeasuredModel,
    Steps,
    average,
    on_two_ranks,
    stage_costs,
)
from partita._torch.tensors.live_bytes import LiveBytes  # noqa: PLC2701 - what the measuring watches with
from partita.pipelining.measuring.link_times import measure_cluster
from partita.planning import Cluster, CostModel, plan_stages, simulate
from partita.planning.generators.plan_schedule import schedule_of
from partita.runtime import ProcessGroupComm

__all__ = ["SCHEDULES", "Row", "SleepingRow", "main", "summary"]

SCHEDULES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "ZBVZeroBubble": 4, "VHalf": 4}
"""With how many stages each runs on two ranks."""

_UNCUT_RUNS = 3
"""Before costs are measured, and again after."""

_ASLEEP = {
    f"asleep on {ranks}, {'uneven' if uneven else 'even'}": (ranks, uneven)
    for ranks in (2, 4, 8)
    for uneven in (False, True)
}
"""How many ranks, and whether their stages take unlike times."""


@dataclass(frozen=True)
class Row:
    """One model under one schedule.

    Attributes:
        predicted_s: the simulator's makespan.
        step: the measured step over that, round by round, had the machine been as fast as when the costs were
            measured.
        ideal: the measured step over the ideal one, round by round.
        predicted_bytes: for each rank what tensors hold at most beyond parameters and gradients.
        live_bytes: the same, watched.
        memory: parameters, gradients and what is watched, over the same with what is predicted; the rank that
            is furthest off.
        spread: of the measured costs, the largest of a unit.
    """

    model: str
    schedule: str
    predicted_s: float
    step: Ratio
    ideal: Ratio
    predicted_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]
    memory: float
    spread: float


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    only: Sequence[str] = (),
) -> list[Row | SleepingRow]:
    """Predict and run each model under each schedule, print tables, and write JSON where a path is given.

    Args:
        quick: one small model and two ranks asleep, one schedule, one round: whether it runs, not how well.
        only: patterns of the cells to measure, ``model/schedule``.
    """
    console = console or Console()
    models, asleep = (["MLP"], ["asleep on 2, uneven"]) if quick else (list(MODELS), list(_ASLEEP))
    schedules, rounds = (["1F1B"], 1) if quick else (list(SCHEDULES), MIN_ROUNDS)
    cells = [f"{name}/{schedule}" for name in (*models, *asleep) for schedule in schedules]
    chosen: dict[str, list[str]] = {}
    for cell in chosen_cells(cells, only):
        name, _, schedule = cell.rpartition("/")
        chosen.setdefault(name, []).append(schedule)
    rows: list[Row] = []
    sleeping: list[SleepingRow] = []
    for name, own in chosen.items():
        console.print(name, style="dim")
        if name in _ASLEEP:
            ranks, uneven = _ASLEEP[name]
            stages = [(schedule, SCHEDULES[schedule] // RANKS) for schedule in own]
            sleeping += sleeping_rows(ranks, stages, rounds, uneven=uneven, quick=quick)
        else:
            rows += on_two_ranks(_rows, name, own, rounds, quick)
    if rows:
        console.print(_table(rows))
        console.print(summary(rows))
    if sleeping:
        console.print(_sleeping_table(sleeping))
        console.print(f"asleep: {_off([row.step for row in sleeping])}")
    write_json(json_path, "prediction", [*rows, *sleeping])
    return [*rows, *sleeping]


def _table(rows: Sequence[Row]) -> Table:
    table = Table("model", "schedule", "predicted, s", "step / predicted", "step / ideal", "memory", "spread")
    for row in rows:
        table.add_row(
            row.model,
            row.schedule,
            f"{row.predicted_s:.3f}",
            str(row.step),
            str(row.ideal),
            f"{row.memory:.3f}",
            f"{row.spread:.2f}",
        )
    return table


def _sleeping_table(rows: Sequence[SleepingRow]) -> Table:
    table = Table("ranks", "stages", "schedule", "asleep, s", "predicted, s", "step / predicted")
    for row in rows:
        stages = "uneven" if row.uneven else "even"
        seconds = f"{row.nominal_s:.3f}", f"{row.predicted_s:.3f}"
        table.add_row(str(row.ranks), stages, row.schedule, *seconds, str(row.step))
    return table


def _off(steps: Sequence[Ratio]) -> str:
    """The median and the worst error of predicted steps, in words."""
    errors = [100 * abs(step.median - 1.0) for step in steps]
    return f"time off by {statistics.median(errors):.1f} % (median), {max(errors):.1f} % (worst)"


def summary(rows: Sequence[Row]) -> str:
    """The median and the worst error of time and of memory, and step over ideal step, in words."""
    memories = [abs(row.memory - 1.0) for row in rows]
    ideals = [row.ideal.median for row in rows]
    return (
        f"{_off([row.step for row in rows])}; "
        f"memory by {100 * statistics.median(memories):.1f} % and {100 * max(memories):.1f} %; "
        f"{statistics.median(ideals):.2f} and {max(ideals):.2f} times the ideal step"
    )


# --- processes ---


def _rows(comm: ProcessGroupComm, name: str, schedules: list[str], rounds: int, quick: bool) -> list[Row]:
    model = MeasuredModel.of(MODELS[name](quick), max(SCHEDULES[schedule] for schedule in schedules))
    cluster, before = measure_cluster(comm), _weighed_costs(model, comm)
    rows: list[Row] = []
    for schedule in schedules:
        row, before = _row(name, model, schedule, comm, cluster, before, rounds)
        rows.append(row)
    return rows


def _weighed_costs(model: MeasuredModel, comm: ProcessGroupComm) -> tuple[CostModel, float]:
    """Costs, and what the uncut model took meanwhile by the same measure: a median over runs before and
    after, which no disturbance counts in, and the mean over the ranks.
    """
    own = [timed(comm, model.train, alone=True) for _ in range(_UNCUT_RUNS)]
    costs = model.costs(comm)
    own += [timed(comm, model.train, alone=True) for _ in range(_UNCUT_RUNS)]
    return costs, statistics.mean(comm.all_gather_object(statistics.median(own)))


def _row(
    name: str,
    model: MeasuredModel,
    schedule: str,
    comm: ProcessGroupComm,
    cluster: Cluster,
    before: tuple[CostModel, float],
    rounds: int,
) -> tuple[Row, tuple[CostModel, float]]:
    """The row, and costs that were measured after its steps."""
    # Plan from costs that both ranks measure at once.
    count = SCHEDULES[schedule]
    options = {"schedule": schedule, "microbatches": MICROBATCHES}
    plan = plan_stages(before[0], count, cluster=cluster, **options)  # type: ignore[arg-type]
    # Run what was planned.
    run = Steps(model.subject, plan, comm)
    seconds, uncut = [], []
    for _ in range(rounds):
        sooner = timed(comm, model.train)
        seconds.append(timed(comm, run))
        uncut.append((sooner + timed(comm, model.train)) / 2)
    with LiveBytes() as live:
        run()
    run.close()
    static = sum(2 * parameter.nbytes for module in run.modules for parameter in module.parameters())
    held = comm.all_gather_object((static, live.most))
    # Predict it.
    after = _weighed_costs(model, comm)
    costs = average(before[0], after[0])
    predicted = simulate(schedule_of(plan), stage_costs(costs, plan), cluster)
    a_step = predicted.makespan_s / ((before[1] + after[1]) / 2)
    peaks = predicted.peak_bytes
    ratios = [(own + most) / (own + peak) for (own, most), peak in zip(held, peaks, strict=True)]
    row = Row(
        name,
        schedule,
        predicted.makespan_s,
        ratio(seconds, [a_step * whole_s for whole_s in uncut]),
        ratio(seconds, [whole_s / RANKS / (1.0 - _best_bubble(costs, count, options)) for whole_s in uncut]),
        peaks,
        tuple(most for _, most in held),
        max(ratios, key=lambda it: abs(it - 1.0)),
        max(unit.spread for unit in costs.units),
    )
    return row, after


def _best_bubble(costs: CostModel, stages: int, options: dict[str, Any]) -> float:
    """Of the best cut, were messages to take no time."""
    free = Cluster(RANKS)
    plan = plan_stages(costs, stages, cluster=free, **options)
    return simulate(schedule_of(plan), stage_costs(costs, plan), free).bubble
