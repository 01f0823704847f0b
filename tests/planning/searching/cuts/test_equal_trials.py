from __future__ import annotations

from partita.planning import Cluster, CostModel, Unit, plan_stages, search
from partita.planning.cutting.equal_stages import distinct_stages, unit_kinds
from partita.planning.generators.plan_schedule import schedule_of
from partita.planning.plan import Plan
from partita.planning.simulating.simulate import simulate

BLOCK = {"norm": 0.1, "qkv": 0.6, "mix": 0.5, "out": 0.3, "add": 0.05, "up": 0.8, "act": 0.1, "down": 0.7}


def blocks() -> CostModel:
    """Eight equal blocks, an embedding, and a head that takes a quarter as long as a block."""
    seconds = [("embed", 0.2), *([*BLOCK.items()] * 8), ("head", 0.8)]
    numbers = {name: number for number, name in enumerate(dict(seconds))}
    units = tuple(
        Unit(
            f"{index}:{name}",
            time,
            2 * time,
            backward_input_s=time,
            backward_weight_s=time,
            activation_bytes=8,
            kind=numbers[name],
        )
        for index, (name, time) in enumerate(seconds)
    )
    return CostModel(units, (4,) * (len(units) - 1))


COSTS = blocks()


def distinct(plan: Plan) -> int:
    places = [*(stage.first_unit for stage in plan.stages), len(COSTS.units)]
    return distinct_stages(unit_kinds(COSTS), places)


def step_s(plan: Plan) -> float:
    return simulate(schedule_of(plan), plan).makespan_s


def test_stages_that_share_ranks_are_made_equal_where_the_step_takes_hardly_longer() -> None:
    for schedule, ranks, part in (("Interleaved1F1B", 2, 0.02), ("ZBVZeroBubble", 4, 0.05)):
        without, equal = (
            plan_stages(COSTS, 8, cluster=Cluster(ranks), schedule=schedule, for_equal_stages=most)
            for most in (None, part)
        )
        assert distinct(equal) == 3 < distinct(without)
        assert step_s(equal) <= (1 + part) * step_s(without)


def test_the_first_plan_of_a_search_has_fewer_stages_that_differ() -> None:
    without, equal = (search(COSTS, Cluster(4), for_equal_stages=part)[0] for part in (None, 0.02))
    assert distinct(equal.plan) < distinct(without.plan)
    assert step_s(equal.plan) == equal.makespan_s <= 1.02 * without.makespan_s
