"""What ranks tell one another before a step."""

from __future__ import annotations

import pytest
import torch
from tests.pipelining.models import PLAIN, SKIP
from tests.pipelining.running import cut

from partita.errors import SignatureMismatch
from partita.pipelining.interface.routes import Routes, StageBorder, make_routes
from partita.pipelining.interface.values import Value
from partita.pipelining.steps.preparing.agreement import (
    BatchSizes,
    Relay,
    StepAgreement,
    neighbours,
    rank_pairs,
)
from partita.runtime import Comm, InProcessWorld


def _routes(dynamic: bool = True) -> Routes:
    return cut(PLAIN, 4, dynamic_shapes=None if dynamic else False).routes


SIZES = BatchSizes((3, 2), ((3,), (2,)))


def _agree(
    routes: Routes, ranks: tuple[int, ...], sizes: BatchSizes | None, what: str = "step"
) -> list[BatchSizes]:
    def body(comm: Comm) -> BatchSizes:
        pairs = rank_pairs(routes, ranks)
        comm.connect({pair for a, b in sorted(pairs) for pair in ((a, b), (b, a))})
        agreement = StepAgreement(comm, routes, ranks, 2)
        mine = sizes if comm.rank == ranks[0] else None
        return agreement.agree(what.format(comm.rank), mine, len(routes.symbols))

    return InProcessWorld(max(ranks) + 1).run(body)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 0, 1), (1, 0, 0, 2), (0, 0, 0, 0)])
def test_sizes_of_the_first_stage_reach_every_rank(ranks: tuple[int, ...]) -> None:
    assert _agree(_routes(), ranks, SIZES) == [SIZES] * (max(ranks) + 1)


def test_where_no_size_is_open_nothing_is_told() -> None:
    routes = _routes(dynamic=False)
    assert Relay.of(0, routes, (0, 1, 2, 3), 2) is None
    assert _agree(routes, (0, 1, 2, 3), None) == [BatchSizes()] * 4


def test_a_rank_that_exchanges_nothing_is_told_by_the_first_stages() -> None:
    fixed = cut(PLAIN, 2).routes
    tensor = torch.empty(2)
    apart = make_routes(
        [StageBorder(("x",), ("h",)), StageBorder(("h",), ("k",)), StageBorder((), ("o",))],
        {"x": 0, "h": 0, "k": 1, "o": 2},
        {"x": tensor, "h": tensor, "k": tensor, "o": tensor},
        [Value.of("x", tensor)],
        [],
        sizes=fixed.sizes,
    )
    assert neighbours(2, apart, (0, 1, 2)) == (0,)
    assert _agree(apart, (0, 1, 2), SIZES) == [SIZES] * 3


def test_the_way_is_a_shortest_one() -> None:
    routes = cut(SKIP, 4).routes
    relays = [Relay.of(rank, routes, (0, 1, 2, 3), 2) for rank in range(4)]
    assert [relay.parent for relay in relays if relay] == [None, 0, 0, 0]
    assert relays[0] is not None
    assert relays[0].children == (1, 2, 3)
    assert relays[0].length == 4


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 0, 0, 2)])
def test_ranks_that_disagree_say_so_also_where_numbers_travel(ranks: tuple[int, ...]) -> None:
    with pytest.raises(SignatureMismatch, match=r"is about to run step \d, but rank \d step \d"):
        _agree(_routes(), ranks, SIZES, "step {}")


def test_the_first_stages_rank_knows_its_sizes_where_nobody_is_told() -> None:
    closed = BatchSizes((3, 2), ((), ()))
    assert _agree(_routes(dynamic=False), (0, 1, 2, 3), closed) == [closed, *[BatchSizes()] * 3]


def test_a_mode_with_fewer_open_sizes_reads_its_own() -> None:
    sizes = BatchSizes((4, 3), ((9, 8), (7, 6)))
    assert BatchSizes.of_numbers([*sizes.numbers(), 0, 0], 2, 2) == sizes
    fixed = BatchSizes((4, 3), ((), ()))
    assert BatchSizes.of_numbers([*fixed.numbers(), 0, 0, 0, 0], 2, 0) == fixed
