"""Steps of models that are cut by plan and by rules of thumb, on two processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.harness import MIN_ROUNDS, Ratio, ratio
from benchmarks.prediction_models import UNEVEN
from benchmarks.ranks import timed
from benchmarks.two_ranks import MICROBATCHES, MeasuredModel, Steps, on_two_ranks
from partita.pipelining.measuring.link_times import measure_cluster
from partita.planning import CostModel, Plan, Unit, plan_stages, search
from partita.planning.cutting.make_stage import make_stage
from partita.runtime import ProcessGroupComm

__all__ = ["CASES", "RULES", "MeasuredRow", "balanced", "measure"]

CASES = {2: "1F1B", 4: "Interleaved1F1B"}
"""Numbers of stages on two ranks, each with the schedule under which all cuts are compared."""


RULES: dict[str, Callable[[Unit], float]] = {
    "equal layers": lambda _: 1.0,
    "equal parameters": lambda unit: float(unit.parameters),
    "equal times": lambda unit: unit.forward_s + unit.backward_s,
}
"""What each rule of thumb balances."""


@dataclass(frozen=True)
class MeasuredRow:
    """Steps of one model, round by round over the same round of another cut.

    Attributes:
        rules: the steps of each rule of thumb, over those of the best of them.
        planned: the same for the plan with the same schedule.
        free: the same for the best plan of all.
    """

    model: str
    stages: int
    rules: dict[str, Ratio]
    planned: Ratio
    free: Ratio


def measure(model: str, stages: int, *, quick: bool = False) -> MeasuredRow:
    """Cut a model in so many stages in every way and time the steps in turn."""
    seconds: dict[str, list[float]] = on_two_ranks(
        _seconds, model, stages, 1 if quick else 2 * MIN_ROUNDS, quick
    )
    of_rules = {rule: seconds[rule] for rule in RULES}
    best = min(of_rules.values(), key=lambda times: sorted(times)[len(times) // 2])
    return MeasuredRow(
        model,
        stages,
        {name: ratio(times, best) for name, times in of_rules.items()},
        ratio(seconds["planned"], best),
        ratio(seconds["free"], best),
    )


def balanced(costs: CostModel, rule: str, stages: int) -> list[int]:
    """The cuts of a rule of thumb: its heaviest stage is as light as can be, and of these the first ones."""
    count = len(costs.units)
    sums = [0.0]
    for unit in costs.units:
        sums.append(sums[-1] + RULES[rule](unit))
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [0])}]
    for stage in range(1, stages + 1):
        layer: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            layer[end] = min(
                (max(heaviest, sums[end] - sums[start]), [*cuts, end])
                for start, (heaviest, cuts) in best[-1].items()
                if start < end
            )
        best.append(layer)
    return best[-1][count][1]


def _seconds(
    comm: ProcessGroupComm, model: str, stages: int, rounds: int, quick: bool
) -> dict[str, list[float]]:
    measured = MeasuredModel.of(UNEVEN[model](quick), stages)
    cluster, costs = measure_cluster(comm), measured.costs(comm)
    options = {"cluster": cluster, "microbatches": MICROBATCHES}
    planned = plan_stages(costs, stages, schedule=CASES[stages], **options)  # type: ignore[arg-type]
    free = search(costs, **options)[0].plan  # type: ignore[arg-type]
    plans = {rule: _cut_at(planned, costs, balanced(costs, rule, stages)) for rule in RULES}
    runs = {
        name: Steps(measured.subject, plan, comm)
        for name, plan in {**plans, "planned": planned, "free": free}.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + rounds):
        for name, run in runs.items():
            taken = timed(comm, run)
            if number:  # the first round warms up
                seconds[name].append(taken)
    for run in runs.values():
        run.close()
    return seconds


def _cut_at(plan: Plan, costs: CostModel, cuts: Sequence[int]) -> Plan:
    stages = [make_stage(costs, index, start, end - 1) for index, (start, end) in enumerate(pairwise(cuts))]
    return replace(plan, stages=tuple(stages), cuts=())
