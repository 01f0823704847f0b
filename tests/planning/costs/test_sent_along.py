from __future__ import annotations

import dataclasses

from tests.planning.costs.test_spanning import across

from partita.planning import Cluster, CostModel, Unit, get_schedule, plan_stages, search, simulate
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.costs.sent_along import sent_along
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.spanning import SpanningValue
from partita.planning.generators.plan_schedule import schedule_of


def _skipping(length: int) -> CostModel:
    """Each unit hands 10 bytes to the next, and to its counterpart at the other end of a U."""
    units = tuple(Unit(str(at), 1.0, 2.0, activation_bytes=20) for at in range(length))
    past = tuple(SpanningValue(10, 10, at, (length - 1 - at,), at) for at in range(length // 2 - 1))
    sizes = tuple(10 + 10 * sum(it.maker <= border < it.last for it in past) for border in range(length - 1))
    return CostModel(units, sizes, entry_bytes=sizes, exit_bytes=(0,) * (length - 1), spanning=past)


def test_what_goes_past_a_stage_is_sent_straight_and_not_by_it() -> None:
    costs, cuts = across(), (0, 1, 2, 3, 4)
    shared = shared_on_rank(costs, cuts, (0, 1, 2, 3))
    stages = [recomputed_cost(costs, at, at, shared=shared[at]) for at in range(4)]
    values = {(0, 1): 1, (0, 3): 100, (1, 2): 1, (2, 3): 1}
    assert sent_along(stages) == (values, {(to, sender): size for (sender, to), size in values.items()})
    assert stages[3].returned_gradient_bytes == 101


def test_a_message_that_goes_past_a_stage_takes_its_time_on_its_own_link() -> None:
    """100 bytes that go from the first stage to the last seemed to hold up what goes to the second one, and
    the ranks of both worked for one message each less than there are.
    """
    costs, cuts = across(), (0, 1, 2, 3, 4)
    shared = shared_on_rank(costs, cuts, (0, 1, 2, 3))
    stages = [recomputed_cost(costs, at, at, shared=shared[at]) for at in range(4)]
    schedule = get_schedule("GPipe")(4, 1)
    cluster = Cluster(4, bandwidth_bytes_per_s=1.0)
    result = simulate(schedule, stages, cluster)
    seconds = {(it.action.stage, it.action.other_stage): it.seconds for it in result.transfers}
    assert seconds == {
        (before, after): 100.0 if abs(after - before) == 3 else 1.0
        for one, other in ((0, 1), (0, 3), (1, 2), (2, 3))
        for before, after in ((one, other), (other, one))
    }
    assert result.makespan_s == (1 + 100 + 1 + 2) + (100 + 2)
    works = dataclasses.replace(cluster, bandwidth_bytes_per_s=float("inf"), overhead_s=0.5)
    # Each of the first and the last stage takes part in two messages a pass, as do the others.
    assert simulate(schedule, stages, works).busy_s == (5.0,) * 4


def test_plans_and_searches_know_of_it_and_a_plan_keeps_it() -> None:
    costs = _skipping(16)
    cluster = Cluster(4, memory_bytes=1000, overhead_s=0.1)
    for candidate in search(costs, cluster, microbatches=8):
        result = simulate(schedule_of(candidate.plan), candidate.plan)
        assert (candidate.makespan_s, candidate.peak_bytes) == (result.makespan_s, result.peak_bytes)
        assert max(result.peak_bytes) <= 1000
    plan = plan_stages(costs, 4, cluster=cluster)
    assert any(to > stage.index + 1 for stage in plan.stages for to, _ in stage.sent_values or ())
    assert type(plan).from_json(plan.to_json()) == plan
