"""Ranks talk in the first two passes, and afterwards where one of them has something new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partita.ddp.reducing.agreement import GraphFingerprint
from partita.ddp.reducing.consensus import Consensus
from partita.runtime import InProcessWorld
from partita.runtime.weight_sample import SAMPLE_FLAGS

QUIET = torch.zeros(1 + SAMPLE_FLAGS)
NEWS = torch.eye(1, 1 + SAMPLE_FLAGS)[0]
DRIFT = torch.ones(1 + SAMPLE_FLAGS) - NEWS
"""Each bit of the weights is set on some rank, and clear on some."""


class Counting:
    """A comm of one rank that counts exchanges."""

    def __init__(self) -> None:
        self.exchanges = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self.exchanges += 1
        return [value]


def new_consensus(count: int = 3) -> tuple[Counting, Consensus]:
    comm = Counting()
    return comm, Consensus(comm, count, check_graphs=True)  # type: ignore[arg-type]


def test_gradients_are_expected_from_the_last_parameter_to_the_first() -> None:
    assert new_consensus()[1].order == (2, 1, 0)


def test_after_two_passes_ranks_talk_only_about_news() -> None:
    comm, consensus = new_consensus()
    for news in (QUIET, QUIET, QUIET, NEWS, QUIET):
        consensus.exchange(())
        consensus.pass_ends(news)
    assert comm.exchanges == 3  # of passes 0, 1 and 4
    assert consensus.step == 5


@pytest.mark.parametrize(
    ("they_differ", "compared_after"), [(True, [1]), (False, [1, 2, 4, 8])], ids=["differ", "are equal"]
)
def test_weights_are_compared_where_samples_differ_once_or_ever_less_often(
    they_differ: bool, compared_after: list[int]
) -> None:
    _, consensus = new_consensus()
    compared = []

    def warn(step: int) -> bool:
        compared.append(step)
        return they_differ

    consensus.warn_of_drift = warn
    for flags in (*[DRIFT] * 10, QUIET, NEWS):
        consensus.exchange(())
        consensus.pass_ends(flags)
    assert compared == compared_after


def test_the_second_pass_takes_over_the_order_that_the_first_one_has_seen() -> None:
    _, consensus = new_consensus()
    assert not consensus.exchange(())
    for index in (1, 2, 1):
        consensus.observe(index)
    consensus.pass_ends(QUIET)
    assert consensus.exchange(())
    assert consensus.order == (1, 2, 0)


def test_a_compiled_graph_is_news_until_it_has_been_announced() -> None:
    _, consensus = new_consensus()
    assert not consensus.has_news
    consensus.add_graph(GraphFingerprint(("a",), ()))
    assert consensus.has_news
    consensus.exchange(())
    assert not consensus.has_news


def test_all_ranks_take_the_order_of_rank_0() -> None:
    def body(comm: Any) -> tuple[int, ...]:
        consensus = Consensus(comm, 2, check_graphs=True)
        consensus.exchange((comm.rank, 1 - comm.rank))
        return consensus.order

    assert InProcessWorld(2).run(body) == [(0, 1), (0, 1)]
