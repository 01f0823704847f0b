"""Steps of stages that sleep, on more ranks than there are cores, beside what is predicted for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from benchmarks.harness import Ratio, ratio
from benchmarks.prediction_models import Subject
from benchmarks.ranks import on_ranks, timed
from benchmarks.sleepers import WIDTH, sleepers
from benchmarks.two_ranks import MeasuredModel, average
from partita.capture import capture
from partita.pipelining import SplitPoint, get_schedule_class, pipeline
from partita.pipelining.measuring.link_times import measure_cluster
from partita.planning import Cluster, Schedule, StageCost, get_schedule, simulate
from partita.planning.costs.recompute import recomputed_cost
from partita.runtime import ProcessGroupComm

__all__ = ["SleepingRow", "sleeping_rows"]

_UNEVEN = (1.0, 0.5, 1.5)
_LIMIT_S = 600.0


@dataclass(frozen=True)
class SleepingRow:
    """One schedule on so many ranks.

    Attributes:
        uneven: whether stages sleep for unlike times.
        nominal_s: the simulator's makespan for passes that take exactly what they sleep, without messages.
        predicted_s: that for the costs and links that were measured before the steps and after them.
        step: the measured step over `predicted_s`, round by round.
    """

    ranks: int
    uneven: bool
    schedule: str
    nominal_s: float
    predicted_s: float
    step: Ratio


def sleeping_rows(
    ranks: int, schedules: Sequence[tuple[str, int]], rounds: int, *, uneven: bool, quick: bool = False
) -> list[SleepingRow]:
    """Predict and run each schedule; F, I and W of a stage sleep for 10 ms each, or for 1, 0.5 and 1.5 times
    as long in turn.

    Args:
        schedules: each with how many stages a rank has.
        quick: short stages and few microbatches.
    """
    unit_s, microbatches = (0.002, 2 * ranks) if quick else (0.010, 4 * ranks)
    return on_ranks(ranks, _LIMIT_S, _rows, schedules, unit_s, microbatches, rounds, uneven)


def _rows(
    comm: ProcessGroupComm,
    schedules: Sequence[tuple[str, int]],
    unit_s: float,
    microbatches: int,
    rounds: int,
    uneven: bool,
) -> list[SleepingRow]:
    cluster = measure_cluster(comm)
    return [
        _row(
            comm,
            cluster,
            get_schedule(name)(stages_a_rank * comm.size, microbatches, comm.size),
            [
                unit_s * (_UNEVEN[stage % len(_UNEVEN)] if uneven else 1.0)
                for stage in range(stages_a_rank * comm.size)
            ],
            rounds,
            uneven,
        )
        for name, stages_a_rank in schedules
    ]


def _row(
    comm: ProcessGroupComm,
    cluster: Cluster,
    plan: Schedule,
    units_s: Sequence[float],
    rounds: int,
    uneven: bool,
) -> SleepingRow:
    # Measure, run, and measure again.
    model = _measured_model(units_s)
    before = model.costs(comm)
    seconds = _steps_s(comm, model.subject, plan, rounds)
    costs = average(before, model.costs(comm))
    # Predict it.
    of_stages = [recomputed_cost(costs, stage, stage, parameter_copies=0.0) for stage in range(plan.stages)]
    predicted_s = simulate(plan, of_stages, cluster).makespan_s
    # The first stage has no I: nobody wants gradients of the batch.
    asleep = [StageCost(unit_s, 2 * unit_s, unit_s, unit_s) for unit_s in units_s]
    asleep[0] = StageCost(units_s[0], units_s[0], 0.0, units_s[0])
    return SleepingRow(
        comm.size,
        uneven,
        plan.name,
        simulate(plan, asleep).makespan_s,
        predicted_s,
        ratio(seconds, [predicted_s] * rounds),
    )


def _steps_s(comm: ProcessGroupComm, subject: Subject, plan: Schedule, rounds: int) -> list[float]:
    spec = {str(stage): SplitPoint.END for stage in range(plan.stages - 1)}
    pipe = pipeline(subject.model, subject.args, split_spec=spec)
    own = [stage for stage, rank in enumerate(plan.stage_ranks) if rank == comm.rank]
    stages = [pipe.build_stage(stage, comm=comm) for stage in own]
    schedule = get_schedule_class(plan.name)(stages, plan.microbatches, subject.loss_fn)
    x = torch.zeros(plan.microbatches, WIDTH)
    step = partial(schedule.step, x, target=x)
    step()
    seconds = [timed(comm, step) for _ in range(rounds)]
    schedule.close()
    return seconds


def _measured_model(units_s: Sequence[float]) -> MeasuredModel:
    """To be measured in units that are the stages."""
    x = torch.zeros(1, WIDTH)
    subject = Subject(sleepers(units_s), (x,), functional.mse_loss, x)
    captured = capture(subject.model, subject.args, prove=False)
    nodes = enumerate(captured.module.graph.nodes)
    ends = [position for position, node in nodes if node.target is torch.ops.aten.add.Tensor]
    return MeasuredModel(subject, captured, ends[:-1])
