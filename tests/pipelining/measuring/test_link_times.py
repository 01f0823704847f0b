from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from partita.pipelining.measuring.link_times import LinkTimes, cluster_of, links_between, measure_cluster
from partita.planning import Cluster
from partita.runtime import Comm, InProcessWorld

NEAR = LinkTimes(1.0, 0.5, 0.25, 0.125)
FAR = LinkTimes(2.0, 1.0, 0.5, 0.25)


def test_what_both_ends_do_is_not_on_the_way() -> None:
    times = LinkTimes.of(10, one_way_s=(3.0, 13.0), both_ends_s=(2.0, 6.0))
    assert times == LinkTimes(1.0, 0.6, 1.0, 0.2)
    cluster = cluster_of(["here"] * 2, [times])
    assert cluster.transfer_s(10, 0, 1) + 2 * cluster.handling_s(10, 0, 1) == 13.0


def test_both_ends_do_no_more_than_the_whole_and_no_less_than_nothing() -> None:
    assert LinkTimes.of(10, one_way_s=(3.0, 3.0), both_ends_s=(4.0, -1.0)) == LinkTimes(0.0, 0.0, 1.5, 0.0)
    assert cluster_of(["here"] * 2, [LinkTimes(0.0, 0.0, 0.0, 0.0)]).bandwidth_bytes_per_s == math.inf


def test_links_within_and_between_hosts_are_levels() -> None:
    cluster = cluster_of(["a", "a", "b", "b"], [NEAR, FAR, NEAR])
    assert (cluster.transfer_s(2, 2, 3), cluster.handling_s(2, 2, 3)) == (2.0, 0.5)
    assert (cluster.transfer_s(2, 0, 3), cluster.handling_s(2, 0, 3)) == (4.0, 1.0)


@pytest.mark.parametrize("hosts", [["a", "b", "b"], ["a", "b", "a"], ["a", "b", "a", "b"]])
def test_the_slowest_link_counts_where_hosts_have_no_equal_runs(hosts: list[str]) -> None:
    times = [NEAR if here == there else FAR for here, there in pairwise(hosts)]
    cluster = cluster_of(hosts, times)
    assert cluster.transfer_s(2, 0, 1) == cluster.transfer_s(2, 1, 2) == 4.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_measure_the_same_cluster(ranks: int) -> None:
    def body(comm: Comm) -> Cluster:
        return measure_cluster(comm)

    first, *others = InProcessWorld(ranks).run(body)
    assert first.ranks == ranks
    assert all(other == first for other in others)


def test_what_has_no_memory_is_not_sent() -> None:
    assert links_between([torch.empty(2, device="meta")]) is None
    assert links_between([torch.empty(2), 3]) is not None
