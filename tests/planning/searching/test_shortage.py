"""What is said where nothing fits, and what is refused before anything is tried."""

from __future__ import annotations

import pickle
import re

import pytest

from partita.errors import InfeasiblePlan
from partita.planning import Cluster, CostModel, Unit, search
from partita.planning.searching import search as search_module

UNITS = tuple(Unit(f"u{index}", 1.0, 2.0, parameter_bytes=10, activation_bytes=5) for index in range(8))
COSTS = CostModel(UNITS, (4,) * 7)


def refusal(costs: CostModel, cluster: Cluster, **options: object) -> InfeasiblePlan:
    with pytest.raises(InfeasiblePlan) as caught:
        search(costs, cluster, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def explore(*_: object, **__: object) -> None:
        raise AssertionError("this was searched for")

    monkeypatch.setattr(search_module, "explore", explore)


@pytest.mark.usefixtures("_no_search")
def test_parameters_that_all_ranks_together_can_not_hold_are_refused_before_the_search() -> None:
    """80 bytes a rank for a model of 141 GB was searched for a minute."""
    error = refusal(COSTS, Cluster(2, memory_bytes=79))
    assert re.match(
        r"nothing fits: the parameters, times 4 for gradients and optimizer state, take 320 bytes, and the 2 "
        r"ranks have 158 bytes together \(5 such ranks have as much\); with ",
        str(error),
    )
    assert "nothing fits: " in str(refusal(COSTS, Cluster(2, memory_bytes=0)))


@pytest.mark.usefixtures("_no_search")
def test_a_unit_that_no_rank_can_hold_is_refused_before_the_search() -> None:
    heavy = Unit("heavy", 1.0, 2.0, parameter_bytes=100, activation_bytes=5)
    error = refusal(CostModel((*UNITS, heavy), (4,) * 8), Cluster(4, memory_bytes=399))
    assert (
        "unit 'heavy' alone takes 405 bytes for one microbatch, and no rank may hold more than 399 bytes"
        in str(error)
    )


@pytest.mark.usefixtures("_no_search")
def test_both_are_said_where_there_are_more_ranks_than_units_too() -> None:
    """Of a mixture of experts on 256 ranks only the unit was told, and that nothing would do."""
    heavy = Unit("heavy", 1.0, 2.0, parameter_bytes=100, activation_bytes=5)
    error = refusal(CostModel((*UNITS, heavy), (4,) * 8), Cluster(16, memory_bytes=399))
    assert str(error).endswith(
        "hold more than 399 bytes; and 16 stages for 16 ranks were asked for, but this model can be cut into "
        "at most 9: take 9 ranks or fewer, with memory for the largest unit"
    )
    # The command line left this out, and said "take fewer ranks or stages" behind it.
    assert error.reason == str(error)


@pytest.mark.usefixtures("_no_search")
def test_units_that_no_cut_may_part_count_as_one() -> None:
    costs = CostModel(UNITS, (4,) * 7, borders=frozenset({3}))
    error = refusal(costs, Cluster(2, memories=(159, 200)), parameter_copies=6)
    assert (
        "units 'u0' to 'u3' take 245 bytes together for one microbatch, and no rank may hold more than 200"
        in str(error)
    )


def test_a_rank_without_a_limit_holds_everything() -> None:
    assert search(COSTS, Cluster(2, memories=(None, 50)))


def test_the_error_carries_what_is_short_and_the_changes_as_data() -> None:
    error = refusal(COSTS, Cluster(4, memory_bytes=80), microbatches=2, recompute=False)
    assert str(error).startswith(f"{error.reason}; with ")
    assert error.changes == {"memory_bytes": 90, "ranks": 8}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.changes) == (str(error), error.reason, error.changes)


def test_sizes_are_readable() -> None:
    units = tuple(Unit(f"u{n}", 1.0, 2.0, 10**9, activation_bytes=10**9) for n in range(8))
    error = refusal(CostModel(units, (4,) * 7), Cluster(4, memory_bytes=8_500_000_000), schedules=["1F1B"])
    assert str(error).endswith(
        "is short by 500 MB (500000024 bytes) of 8.5 GB; "
        "with memory_bytes=9010000000 (9.01 GB a rank) or with 8 ranks it would fit"
    )


def test_more_stages_than_can_be_cut_name_what_can_be_had() -> None:
    error = refusal(COSTS, Cluster(4), stages_per_rank=(3,))
    assert error.reason == ("12 stages for 4 ranks were asked for, but this model can be cut into at most 8")
    assert error.changes == {"stages": 8}
    assert refusal(COSTS, Cluster(9)).changes == {"ranks": 8}
    assert refusal(COSTS, Cluster(9), stages_per_rank=(2,)).changes == {"ranks": 4}
    # machines of three ranks: 512 devices in 64 nodes were told to "take fewer ranks or stages"
    of_threes = {"larger": lambda ranks: None if ranks % 3 else Cluster(ranks)}
    assert refusal(COSTS, Cluster(9), **of_threes).changes == {"ranks": 6}


def test_schedules_in_a_v_name_the_stages_that_they_need() -> None:
    """It said "Give at least one schedule" to whoever had given one."""
    error = refusal(COSTS, Cluster(4), stages_per_rank=(1,), schedules=["VMin", "zbvzerobubble"])
    assert str(error) == (
        "VMin, ZBVZeroBubble need two stages a rank, in a V: 8 for 4 ranks; ask for 8 stages, or for other "
        "schedules"
    )
    assert error.changes == {"stages": 8}
    error = refusal(COSTS, Cluster(5), schedules=["VHalf"])
    assert str(error) == (
        "VHalf needs two stages a rank, in a V: 10 for 5 ranks, but this model can be cut into at most 8; "
        "take 4 ranks or fewer, other schedules, or measure its costs by smaller units"
    )
    assert "Give at least one schedule" in str(refusal(COSTS, Cluster(4), schedules=[]))
