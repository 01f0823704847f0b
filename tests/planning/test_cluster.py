from __future__ import annotations

import math

import pytest

from partita.errors import PlanError
from partita.planning import Cluster


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    assert Cluster(2, bandwidth_bytes_per_s=100.0, latency_s=0.5).transfer_s(50) == 1.0


def test_links_take_no_time_where_nothing_is_said() -> None:
    assert Cluster(2).transfer_s(10**15) == 0.0


@pytest.mark.parametrize("cluster", [Cluster(2), Cluster(3, 1e9, 1e-5, 2**30)])
def test_a_cluster_survives_json(cluster: Cluster) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0: give a whole number of at least 1"),
        ({"ranks": 1, "bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s is 0.0: give a number above 0"),
        ({"ranks": 1, "bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s is nan"),
        ({"ranks": 1, "latency_s": -1.0}, "latency_s is -1.0"),
        ({"ranks": 1, "memory_bytes": -1}, "memory_bytes is -1"),
    ],
)
def test_a_value_out_of_range_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cluster(**arguments)  # type: ignore[arg-type]


def test_a_ring_sends_everything_twice_but_for_the_own_share() -> None:
    assert Cluster(4, bandwidth_bytes_per_s=10.0, latency_s=0.5).all_reduce_s(40) == 6 * (0.5 + 1.0)


def test_one_rank_has_nothing_to_reduce() -> None:
    assert Cluster(1, 1.0, 1.0).all_reduce_s(10**9) == 0.0
