"""All ranks measure at once, and plan alike."""

from __future__ import annotations

import pickle

from tests.runtime.worlds import endings, patience

from partita.errors import PeerFailed
from partita.pipelining.frontends.cuts.plan_request import PlanRequest
from partita.planning import Cluster, CostModel, Unit
from partita.runtime import Comm

COSTS = CostModel(tuple(Unit(name, 1.0, 2.0) for name in "abcd"), (8, 8, 8))
SLOW = Cluster(2, latency_s=0.5, overhead_s=0.25)


def _planned(comm: Comm) -> bytes:
    plan = PlanRequest(None, "auto", None, "1F1B", 4).planned(lambda: COSTS, lambda _: SLOW)
    given = PlanRequest(None, "auto", Cluster(2), "1F1B", 4).planned(lambda: COSTS, lambda _: SLOW)
    return pickle.dumps((comm.rank, plan.cluster, given.cluster))


def test_a_search_takes_the_links_as_they_were_measured_unless_they_are_given() -> None:
    with patience(90.0):  # imports, and searches twice
        ended = endings(2, _planned)
    assert not any(ending.error for ending in ended), [ending.text for ending in ended]
    results = [pickle.loads(ending.result) for ending in ended]
    assert results == [(0, SLOW, Cluster(2)), (1, SLOW, Cluster(2))]


def test_stages_that_will_be_compiled_are_made_equal() -> None:
    block = (0.1, 0.5, 1.0, 0.5, 2.0, 0.1, 1.0, 3.0, 1.0)
    seconds = (0.5, *block * 8, 2.0, 2.0)
    units = [Unit(f"{index}", time, 2 * time, kind=int(10 * time)) for index, time in enumerate(seconds)]
    costs = CostModel(tuple(units), (8,) * (len(units) - 1))
    distinct = []
    for compiled in (False, True):
        plan = PlanRequest(8, None, None, "1F1B", 4, compiled=compiled).planned(lambda: costs, None)
        distinct.append(len({seconds[stage.first_unit : stage.last_unit + 1] for stage in plan.stages}))
    assert distinct == [7, 4]


def _measured_by_one(comm: Comm) -> str:
    def measure() -> CostModel:
        if comm.rank == 1:
            raise ValueError("no memory for this")
        return COSTS

    try:
        PlanRequest(None, "auto", None, "1F1B", 4).planned(measure, None)
    except ValueError as error:
        return f"raised {error}"
    except PeerFailed as error:
        return f"heard {error}"
    return "nothing"


def test_a_rank_that_fails_while_it_measures_is_named_by_the_others() -> None:
    first, second = (str(ending.result) for ending in endings(2, _measured_by_one))
    assert "heard rank 1" in first
    assert "no memory for this" in first
    assert second.startswith("raised no memory for this")
