"""Does a training step take the time and the memory that the planner says, from costs that it has measured,
and how near is it to the best possible?

``partita bench prediction``. Two processes of one thread each over gloo on this machine train small models
under each schedule. Both measure the costs of the model's units at the same time, since in a step they share
the machine too, and what messages between them take. From these alone `plan_stages` cuts, and `simulate`
says how long the step takes; then the step is run. Costs are measured before and after the steps and
averaged: the weather of a shared machine changes. Memory is what tensors hold at most beyond parameters and
gradients, watched in a step of its own. The ideal step is half of what the uncut model takes, run by both
processes at the same time in turn with the steps, with the bubble of the best cut for messages that take
nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import MIN_ROUNDS, Ratio, ratio, write_json
from benchmarks.prediction_models import MODELS, Subject
from partita._torch.tensors.live_bytes import LiveBytes  # noqa: PLC2701 - what the measuring watches with
from partita.capture import Captured, capture
from partita.pipelining import get_schedule_class, pipeline
from partita.pipelining.frontends.graph.units.chosen_units import units_to_plan
from partita.pipelining.frontends.graph.units.costs import cost_model
from partita.pipelining.frontends.graph.units.unit_runs import GraphLoss
from partita.pipelining.measuring.link_times import measure_cluster
from partita.planning import Cluster, CostModel, Plan, StageCost, plan_stages, simulate
from partita.planning.costs.recompute import neighbours_on_rank, recomputed_cost
from partita.planning.generators.plan_schedule import schedule_of
from partita.runtime import ProcessGroupComm

__all__ = ["SCHEDULES", "Row", "main", "summary"]

SCHEDULES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "ZBVZeroBubble": 4, "VHalf": 4}
"""With how many stages each runs on two ranks."""
_RANKS = 2
_MICROBATCHES = 8
_LIMIT_S = 900.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class Row:
    """One model under one schedule.

    Attributes:
        predicted_s: the simulator's makespan.
        step: the measured step over that, round by round.
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


def main(*, quick: bool = False, json_path: Path | None = None, console: Console | None = None) -> list[Row]:
    """Predict and run each model under each schedule, print a table, and write JSON where a path is given.

    Args:
        quick: one small model, one schedule, one round: whether it runs, not how well.
    """
    console = console or Console()
    names = ["MLP"] if quick else list(MODELS)
    rows: list[Row] = []
    for name in names:
        console.print(name, style="dim")
        schedules = ["1F1B"] if quick else list(SCHEDULES)
        rows += _on_processes(name, schedules, 1 if quick else MIN_ROUNDS, quick)
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
    console.print(table)
    console.print(summary(rows))
    write_json(json_path, "prediction", rows)
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The median and the worst error of time and of memory, and step over ideal step, in words."""
    times = [abs(row.step.median - 1.0) for row in rows]
    memories = [abs(row.memory - 1.0) for row in rows]
    ideals = [row.ideal.median for row in rows]
    return (
        f"time off by {100 * statistics.median(times):.1f} % (median), {100 * max(times):.1f} % (worst); "
        f"memory by {100 * statistics.median(memories):.1f} % and {100 * max(memories):.1f} %; "
        f"{statistics.median(ideals):.2f} and {max(ideals):.2f} times the ideal step"
    )


# --- processes ---


def _on_processes(name: str, schedules: list[str], rounds: int, quick: bool) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_body,
                args=(rank, f"{folder}/store", there, name, schedules, rounds, quick),
                daemon=True,
            )
            for rank in range(_RANKS)
        ]
        for process in processes:
            process.start()
        there.close()
        try:
            if not here.poll(_LIMIT_S):
                raise RuntimeError(f"{name} still runs after {_LIMIT_S:g} s: try fewer schedules or rounds")
            rows: list[Row] = here.recv()
        finally:
            for process in processes:
                process.join(_GRACE_S)
                process.kill()
    return rows


def _body(
    rank: int, path: str, answer: Connection, name: str, schedules: list[str], rounds: int, quick: bool
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, _RANKS)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=limit)
    subject = MODELS[name](quick)
    with ProcessGroupComm.from_group() as comm:
        model = _Measured.of(subject, max(SCHEDULES[schedule] for schedule in schedules))
        cluster, costs, rows = measure_cluster(comm), model.costs(comm), []
        for schedule in schedules:
            row, costs = _row(name, model, schedule, comm, cluster, costs, rounds)
            rows.append(row)
    if rank == 0:
        answer.send(rows)
    dist.destroy_process_group()


@dataclass(frozen=True)
class _Measured:
    """A model that was captured once, to be measured again and again."""

    subject: Subject
    captured: Captured
    ends: list[int]

    @classmethod
    def of(cls, subject: Subject, stages: int) -> _Measured:
        captured = capture(subject.model, subject.args, prove=False)
        return cls(subject, captured, units_to_plan(captured.module, stages, None)[0])

    def costs(self, comm: ProcessGroupComm) -> CostModel:
        """The mean of what all ranks measure at the same time."""
        comm.barrier()
        signature, subject = self.captured.signature, self.subject
        loss = GraphLoss(subject.loss_fn, subject.target, signature.unflatten)
        own = cost_model(self.captured.module, self.ends, signature.flatten(subject.args, {}), loss=loss)
        models = [CostModel.from_json(text) for text in comm.all_gather_object(own.to_json())]
        total = models[0]
        for other in models[1:]:
            total = _average(total, other)
        return total

    def train(self) -> None:
        """What a step computes, uncut."""
        for _ in range(_MICROBATCHES):
            loss = self.subject.loss_fn(self.subject.model(*self.subject.args), self.subject.target)
            (loss / _MICROBATCHES).backward()


def _row(
    name: str,
    model: _Measured,
    schedule: str,
    comm: ProcessGroupComm,
    cluster: Cluster,
    before: CostModel,
    rounds: int,
) -> tuple[Row, CostModel]:
    """The row, and costs that were measured after its steps."""
    # Plan from costs that both ranks measure at once.
    subject, count = model.subject, SCHEDULES[schedule]
    options = {"schedule": schedule, "microbatches": _MICROBATCHES}
    plan = plan_stages(before, count, cluster=cluster, **options)
    # Run what was planned.
    pipe = pipeline(subject.model, subject.args, plan=plan, prove=False)
    stages = [
        pipe.build_stage(stage, comm=comm) for stage, at in enumerate(plan.placement) if at == comm.rank
    ]
    runner = get_schedule_class(schedule)(stages, _MICROBATCHES, subject.loss_fn)  # type: ignore[arg-type]
    batch = tuple(torch.cat([arg] * _MICROBATCHES) for arg in subject.args)
    target = torch.cat([subject.target] * _MICROBATCHES)
    for module in (subject.model, *(stage.module for stage in stages)):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    _run(runner, batch, target)
    seconds, uncut = [], []
    for _ in range(rounds):
        seconds.append(_timed(comm, lambda: _run(runner, batch, target)))
        uncut.append(_timed(comm, model.train))
    with LiveBytes() as live:
        _run(runner, batch, target)
    runner.close()
    static = sum(2 * parameter.nbytes for stage in stages for parameter in stage.module.parameters())
    held = comm.all_gather_object((static, live.most))
    # Predict it.
    after = model.costs(comm)
    costs = _average(before, after)
    predicted = simulate(schedule_of(plan), _stage_costs(costs, plan), cluster)
    peaks = predicted.peak_bytes
    ratios = [(own + most) / (own + peak) for (own, most), peak in zip(held, peaks, strict=True)]
    row = Row(
        name,
        schedule,
        predicted.makespan_s,
        ratio(seconds, [predicted.makespan_s] * rounds),
        ratio(seconds, [whole_s / _RANKS / (1.0 - _best_bubble(costs, count, options)) for whole_s in uncut]),
        peaks,
        tuple(most for _, most in held),
        max(ratios, key=lambda it: abs(it - 1.0)),
        max(unit.spread for unit in costs.units),
    )
    return row, after


def _best_bubble(costs: CostModel, stages: int, options: dict[str, Any]) -> float:
    """Of the best cut, were messages to take no time."""
    free = Cluster(_RANKS)
    plan = plan_stages(costs, stages, cluster=free, **options)
    return simulate(schedule_of(plan), _stage_costs(costs, plan), free).bubble


def _run(runner: Any, batch: tuple[Tensor, ...], target: Tensor) -> None:
    runner.step(*batch, target=target, return_outputs=False)


def _average(one: CostModel, other: CostModel) -> CostModel:
    units = tuple(
        replace(
            left,
            forward_s=(left.forward_s + right.forward_s) / 2,
            backward_s=(left.backward_s + right.backward_s) / 2,
            backward_input_s=((left.backward_input_s or 0.0) + (right.backward_input_s or 0.0)) / 2,
            backward_weight_s=((left.backward_weight_s or 0.0) + (right.backward_weight_s or 0.0)) / 2,
            spread=max(left.spread, right.spread),
        )
        for left, right in zip(one.units, other.units, strict=True)
    )
    return replace(one, units=units)


def _stage_costs(costs: CostModel, plan: Plan) -> list[StageCost]:
    return [
        recomputed_cost(
            costs,
            stage.first_unit,
            stage.last_unit,
            parameter_copies=0.0,
            same_rank=neighbours_on_rank(plan.placement, stage.index),
        )
        for stage in plan.stages
    ]


def _timed(comm: ProcessGroupComm, step: Callable[[], object]) -> float:
    """From the first rank's start to the last rank's end; they share a clock."""
    comm.barrier()
    started = time.monotonic()
    step()
    spans = comm.all_gather_object((started, time.monotonic()))
    return max(end for _, end in spans) - min(start for start, _ in spans)
