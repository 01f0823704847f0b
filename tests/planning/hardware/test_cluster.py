from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest

from partita.errors import PlanError
from partita.planning import Cluster, LinkLevel, PairLink


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


def test_a_ring_of_some_ranks_takes_their_links_alone() -> None:
    cluster = Cluster.of_nodes(2, 4, NVLINK, CARD)
    assert cluster.all_reduce_s(800, (1, 2)) == 2 * (0.125 + 400 / 400)
    assert cluster.all_reduce_s(800, (0, 4)) == cluster.transfer_s(400, 0, 4) + cluster.transfer_s(400, 4, 0)
    assert cluster.all_reduce_s(800, (3,)) == 0.0


def test_each_step_of_a_ring_works_for_two_messages() -> None:
    cluster = Cluster(2, 4.0, 1.0, overhead_s=0.5, overhead_s_per_byte=0.25)
    assert cluster.all_reduce_s(8) == 2 * (1.0 + 4 / 4 + 2 * cluster.handling_s(4, 0, 1))


def test_one_rank_has_nothing_to_reduce() -> None:
    assert Cluster(1, 1.0, 1.0).all_reduce_s(10**9) == 0.0


NVLINK = LinkLevel(bandwidth_bytes_per_s=400.0, latency_s=0.125)
CARD = LinkLevel(bandwidth_bytes_per_s=50.0, latency_s=1.0, ports=1)


def test_ranks_of_one_node_have_its_links_and_those_of_two_have_the_slower_ones() -> None:
    cluster = Cluster.of_nodes(2, 4, NVLINK, CARD)
    assert cluster.ranks == 8
    assert cluster.transfer_s(100, 0, 3) == cluster.transfer_s(100, 7, 4) == 0.375
    assert cluster.transfer_s(100, 3, 4) == cluster.transfer_s(100, 7, 0) == 3.0


def test_a_message_to_oneself_takes_no_time() -> None:
    assert Cluster(2, 1.0, 1.0).transfer_s(10**9, 1, 1) == 0.0


def test_without_ranks_the_slowest_link_counts() -> None:
    pair = PairLink(2, 5, bandwidth_bytes_per_s=10.0)
    assert Cluster.of_nodes(2, 4, NVLINK, CARD).transfer_s(100) == 3.0
    assert Cluster(8, levels=(NVLINK,), pairs=(pair,)).transfer_s(100) == 10.0


def test_a_level_that_joins_nobody_does_not_count() -> None:
    assert Cluster.of_nodes(2, 1, CARD, NVLINK).transfer_s(0) == 0.125
    assert Cluster.of_nodes(1, 2, NVLINK, CARD).transfer_s(0) == 0.125


def test_the_link_of_a_pair_goes_before_its_level_in_its_direction_alone() -> None:
    cluster = Cluster(2, 100.0, pairs=(PairLink(0, 1, 10.0, 1.0),))
    assert cluster.transfer_s(100, 0, 1) == 11.0
    assert cluster.transfer_s(100, 1, 0) == 1.0


def test_each_pair_has_its_own_link_in_each_direction_where_nothing_is_said() -> None:
    cluster = Cluster(4)
    names = {cluster.link(sender, receiver) for sender, receiver in permutations(range(4), 2)}
    assert len(names) == 12


def test_the_ranks_of_a_node_share_its_card() -> None:
    cluster = Cluster.of_nodes(3, 2, NVLINK, CARD)
    assert cluster.link(0, 2) == cluster.link(1, 5)
    assert cluster.links(0, 4)[1] == cluster.links(3, 5)[1]
    assert cluster.link(0, 2) not in cluster.links(2, 0)
    assert cluster.links(0, 1) == ((0, 1),)


def test_ports_are_shared_out_evenly_neighbours_first() -> None:
    cluster = Cluster.of_nodes(2, 8, NVLINK, replace(CARD, ports=4))
    names = [cluster.link(rank, 8) for rank in range(8)]
    assert names == [names[rank // 2 * 2] for rank in range(8)]
    assert len(set(names)) == 4
    each_its_own = Cluster.of_nodes(2, 8, NVLINK, replace(CARD, ports=8))
    assert len({each_its_own.link(rank, 8) for rank in range(8)}) == 8


def test_a_switch_gives_each_rank_one_port() -> None:
    cluster = Cluster(3, levels=(LinkLevel(ports=1),))
    assert cluster.link(0, 1) == cluster.link(0, 2) != cluster.link(1, 2)


def test_pairs_of_one_name_share_a_link() -> None:
    bus = [PairLink(0, 1, 8.0, name="bus"), PairLink(1, 0, 8.0, name="bus"), PairLink(1, 2, 8.0)]
    cluster = Cluster(3, pairs=bus)  # type: ignore[arg-type]
    assert cluster.link(0, 1) == cluster.link(1, 0) != cluster.link(1, 2)
    assert hash(cluster) == hash(Cluster(3, pairs=tuple(bus)))


def test_ranks_may_differ_in_speed_and_memory() -> None:
    cluster = Cluster(3, memory_bytes=100, speeds=(1.0, 0.5, 2.0), memories=(None, 10, 0))
    assert [cluster.speed(rank) for rank in range(3)] == [1.0, 0.5, 2.0]
    assert [cluster.memory(rank) for rank in range(3)] == [100, 10, 0]
    assert (Cluster(1).speed(0), Cluster(1).memory(0)) == (1.0, None)


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    cluster = Cluster.of_nodes(2, 4, NVLINK, CARD)
    assert cluster.all_reduce_s(800) == 14 * (1.0 + 100 / 50)
    bus = tuple(PairLink(rank, (rank + 1) % 4, 8.0, name="bus") for rank in range(4))
    assert Cluster(4, pairs=bus).all_reduce_s(32) == 6 * (8 / (8.0 / 4))


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(4, 10.0, 0.5),
        Cluster.of_nodes(2, 2, NVLINK, CARD),
        Cluster(2, pairs=(PairLink(0, 1, 2.0, 1.0),)),
    ],
)
def test_slowed_links_take_so_many_times_as_long(cluster: Cluster) -> None:
    assert cluster.slowed(4.0).transfer_s(100) == 4 * cluster.transfer_s(100)
    assert cluster.slowed(4.0).all_reduce_s(100) == 4 * cluster.all_reduce_s(100)


def test_a_cluster_of_every_kind_survives_json() -> None:
    cluster = Cluster(
        4,
        memory_bytes=5,
        speeds=(1.0, 2.0, 3.0, 0.5),
        memories=(1, None, 3, 4),
        levels=(replace(NVLINK, ranks=2), CARD),
        pairs=(PairLink(0, 3, 2.0, 1.0, "cable"),),
    )
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_a_cluster_that_was_saved_before_there_were_levels_is_read() -> None:
    text = """{"format": "partita.cluster", "version": 1, "ranks": 3,
               "bandwidth_bytes_per_s": "inf", "latency_s": 0.5, "memory_bytes": null}"""
    assert Cluster.from_json(text) == Cluster(3, latency_s=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speeds": (1.0,)}, "speeds has 1 values for 2 ranks: give one a rank"),
        ({"speeds": (1.0, 0.0)}, "the speed of rank 1 is 0.0: give a finite number above 0"),
        ({"speeds": (math.inf, 1.0)}, "the speed of rank 0 is inf: give a finite number above 0"),
        ({"memories": (1, 2, 3)}, "memories has 3 values for 2 ranks: give one a rank"),
        ({"memories": (1, -2)}, "the memory of rank 1 is -2: give a whole number of at least 0"),
        ({"levels": (LinkLevel(1),)}, r"the last link level joins 1 ranks of 2: add one that joins all"),
        (
            {"levels": (LinkLevel(2), LinkLevel(3))},
            "link level 1 joins 3 ranks, the one before 2: give a mul",
        ),
        ({"levels": (LinkLevel(),), "latency_s": 1.0}, "bandwidth_bytes_per_s, latency_s or an overhead too"),
        (
            {"pairs": (PairLink(0, 2),)},
            "a link from rank 0 to rank 2: ranks are 0 to 1, and a link joins two",
        ),
        (
            {"pairs": (PairLink(1, 1),)},
            "a link from rank 1 to rank 1: ranks are 0 to 1, and a link joins two",
        ),
        ({"pairs": (PairLink(0, 1), PairLink(0, 1))}, "two links from rank 0 to rank 1: give one"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cluster(2, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (lambda cluster: cluster.speed(2), "there is no rank 2: ranks are 0 to 1"),
        (lambda cluster: cluster.memory(-1), "there is no rank -1: ranks are 0 to 1"),
        (lambda cluster: cluster.link(0, 5), "there is no rank 5: ranks are 0 to 1"),
        (lambda cluster: cluster.transfer_s(1, 0), "the sender is 0, the receiver None: give both, or none"),
        (lambda cluster: cluster.slowed(0.0), "factor is 0.0: give a finite number above 0"),
        (lambda _: Cluster.of_nodes(0, 1, NVLINK, CARD), "nodes is 0: give a whole number of at least 1"),
    ],
)
def test_a_question_about_no_rank_is_refused(question: Callable[[Cluster], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        question(Cluster(2))
