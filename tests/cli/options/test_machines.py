"""The machines that options name, and how to name more of them."""

from __future__ import annotations

import pytest

from partita.cli.options.machines import Machines
from partita.errors import UsageError
from partita.planning import Cluster


def test_devices_make_a_cluster_and_say_what_costs_are_for() -> None:
    cluster, device = Machines("16xH100", nodes=2, memory="64GB").cluster()
    assert (cluster.ranks, cluster.memory(15)) == (16, 64 * 10**9)
    assert device is not None
    assert device.name == "H100"
    assert Machines(ranks=3).cluster() == (Cluster(3), None)


@pytest.mark.parametrize(
    ("machines", "ranks", "words"),
    [
        (Machines("16xh100", nodes=2), 24, "--devices 24xH100 --nodes 3"),
        (Machines("16xH100", nodes=2), 17, None),
        (Machines("8xH100", nodes=2), 12, "--devices 12xH100 --nodes 3"),
        (Machines("4xH100"), 6, "--devices 6xH100"),
        (Machines("4xH100"), 12, None),
        (Machines("4xH100"), 16, "--devices 16xH100"),
        (Machines("4xH100", nodes=1), 8, "--devices 8xH100 --nodes 1"),
        (Machines("8xH100", nodes=1), 16, "--devices 16xH100 --nodes 2"),
        (Machines("H100,2xA100", nodes=3), 6, "--devices H100,2xA100,H100,2xA100 --nodes 6"),
        (Machines("H100,2xA100"), 4, None),
        (Machines(ranks=2), 5, "--ranks 5"),
    ],
)
def test_more_ranks_are_named_by_whole_machines(machines: Machines, ranks: int, words: str | None) -> None:
    more = machines.with_ranks(ranks)
    assert (None if more is None else more.in_options()) == words
    cluster = machines.larger(ranks)
    assert (None if cluster is None else cluster.ranks) == (None if words is None else ranks)


@pytest.mark.parametrize(
    ("memory", "meant"),
    [("80", "80GB"), (" 1.5 ", "1.5GB"), ("80GB", ""), ("80B", ""), ("80000000000", ""), (None, "")],
)
def test_a_small_number_of_bytes_has_likely_lost_its_unit(memory: str | None, meant: str) -> None:
    assert Machines(ranks=1, memory=memory).forgotten_unit == meant


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="--memory is '0': give what a rank may hold, such as 80GB"):
        Machines(ranks=1, memory="0").cluster()
