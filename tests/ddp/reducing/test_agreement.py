"""What ranks compare before they reduce anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.ddp.reducing.agreement import (
    GraphFingerprint,
    Proposal,
    agree,
    check_same_replicas,
)
from partita.errors import SignatureMismatch
from partita.runtime import InProcessWorld

PRINT = GraphFingerprint(("a",), (("mm", 2),))
PROPOSAL = Proposal(3, (1, 0), (PRINT,))


def test_two_prints_say_where_they_differ() -> None:
    one = GraphFingerprint(("a", "b"), (("mm", 2),))
    assert "the gradient of 'b'" in one.difference(GraphFingerprint(("a",), (("mm", 2),)))
    assert "operator mm stands 2 times" in one.difference(GraphFingerprint(("a", "b"), (("mm", 3),)))
    assert "another order" in one.difference(GraphFingerprint(("b", "a"), (("mm", 2),)))


def on_two_ranks(proposals: list[Proposal], *, check_graphs: bool = True) -> list[Any]:
    def body(comm: Any) -> Any:
        return agree(comm, proposals[comm.rank], check_graphs=check_graphs)

    return InProcessWorld(2).run(body)


def test_rank_0_decides_the_order() -> None:
    assert on_two_ranks([PROPOSAL, replace(PROPOSAL, order=(0, 1))]) == [(PROPOSAL, "")] * 2


def test_ranks_in_different_steps_are_told_in_which() -> None:
    message = "rank 0 is in synchronised backward pass 3, rank 1 in 4: .* the same number of steps, and enter"
    with pytest.raises(SignatureMismatch, match=message):
        on_two_ranks([PROPOSAL, replace(PROPOSAL, step=4)])


def test_a_graph_that_one_rank_lacks_is_named() -> None:
    with pytest.raises(
        SignatureMismatch, match=r"(?s)only rank 0: graph \w+ \(1 gradients, 2 .*only rank 1: none"
    ):
        on_two_ranks([PROPOSAL, replace(PROPOSAL, graphs=())])


def _graph(operators: int, inputs: str, gradients: str = "ab") -> GraphFingerprint:
    return GraphFingerprint(tuple(gradients), (("mm", operators),), inputs)


@pytest.mark.parametrize(
    ("here", "there", "fine"),
    [
        ([_graph(2, "[4]")], [_graph(2, "[1]")], True),
        ([_graph(2, "[4]")], [_graph(1, "[1]")], True),
        ([_graph(2, "[4]")], [_graph(2, "[4]"), _graph(1, "[1]")], True),  # the last batch, on one rank
        ([_graph(2, "[4]")], [_graph(1, "[4]")], False),
        ([_graph(2, "[4]")], [_graph(1, "[4]"), _graph(1, "[1]")], False),
        ([_graph(2, "[4]")], [_graph(1, "[1]", "a")], False),
        ([_graph(2, "[4]")], [_graph(2, "[4]", "ba")], False),
        ([_graph(2, "[4]"), _graph(1, "[4]", "c")], [_graph(2, "[1]")], False),
        ([], [_graph(2, "[4]")], False),
    ],
)
def test_graphs_for_other_sizes_need_the_same_gradients_only(here: Any, there: Any, fine: bool) -> None:
    for graphs_of_ranks in ([here, there], [there, here]):
        proposals = [replace(PROPOSAL, graphs=tuple(graphs)) for graphs in graphs_of_ranks]
        if fine:
            assert on_two_ranks(proposals) == [(proposals[0], "")] * 2
        else:
            with pytest.raises(SignatureMismatch, match="have compiled different backward graphs"):
                on_two_ranks(proposals)


def test_different_graphs_are_no_error_where_that_is_meant() -> None:
    for first, difference in on_two_ranks([PROPOSAL, replace(PROPOSAL, graphs=())], check_graphs=False):
        assert first == PROPOSAL
        assert difference.startswith(
            "rank 0 and rank 1 have compiled different backward graphs:\n  only rank 0: g"
        )


def test_a_parameter_that_one_rank_lacks_is_named() -> None:
    def body(comm: Any) -> None:
        check_same_replicas(comm, {}, [("a", "float32"), ("b", "float32")][: 2 - comm.rank])

    message = "replicate different models: 'b' is float32 on rank 0 and not there on rank 1; build the same"
    with pytest.raises(SignatureMismatch, match=message):
        InProcessWorld(2).run(body)
