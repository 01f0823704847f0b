"""Every name is written once, by somebody who has it, and copies are equal."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import CheckpointError, PartitaError
from partita.pipelining.checkpoints.contents.replicas import Shares, StateEntry, share_out
from partita.runtime import Comm, InProcessWorld


def shares(
    *values_of_ranks: dict[str, Any], replicas: Any = "equal", roots: dict[str, str] | None = None
) -> list[Shares]:
    """What comes of ranks that hold these values."""

    def body(comm: Comm) -> Shares:
        entries = [
            StateEntry("m", name, value, (roots or {}).get(name, name))
            for name, value in values_of_ranks[comm.rank].items()
        ]
        return share_out(entries, comm.rank, comm.all_gather_object, replicas)

    return InProcessWorld(len(values_of_ranks)).run(body)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sets(st.sampled_from("abcdef")), min_size=1, max_size=4))
def test_each_name_has_one_writer_who_holds_it(names_of_ranks: list[set[str]]) -> None:
    written_by_ranks = shares(
        *({name: torch.tensor(ord(name)) for name in names} for names in names_of_ranks)
    )
    written = [name for share in written_by_ranks for name in share.mine]
    assert sorted(written) == sorted(f"m.{name}" for name in set().union(*names_of_ranks))
    for share, names in zip(written_by_ranks, names_of_ranks, strict=True):
        assert {name.removeprefix("m.") for name in share.mine} <= names


def test_copies_are_written_by_the_rank_with_the_least_to_do() -> None:
    big, small = torch.zeros(100), torch.zeros(1)
    first, second = shares({"a": big, "b": small, "c": small}, {"a": big, "b": small, "c": small})
    assert (first.mine, second.mine) == (("m.a",), ("m.b", "m.c"))


def test_a_tied_name_points_to_the_one_that_is_written() -> None:
    tied = torch.ones(3)
    (written_by_ranks,) = shares({"a": tied, "b": tied, "c": tied}, roots={"b": "a", "c": "a"})
    assert written_by_ranks == Shares(("m.a",), {"m.b": "m.a", "m.c": "m.a"})


def test_ranks_may_know_of_different_ties() -> None:
    def body(comm: Comm) -> Shares:
        value = torch.ones(2)
        names = (("b", "a"), ("a", "a")) if comm.rank == 0 else (("c", "b"), ("b", "b"))
        return share_out(
            [StateEntry("", n, value, r) for n, r in names], comm.rank, comm.all_gather_object, "equal"
        )

    first, second = InProcessWorld(2).run(body)
    assert (first.mine, second.mine) == (("a",), ())
    assert first.aliases == second.aliases == {"b": "a", "c": "a"}


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (torch.zeros(2), torch.ones(2), "both float32[2], with different values"),
        (torch.zeros(2), torch.zeros(3), "float32[2] and float32[3]"),
        (torch.zeros(2), torch.zeros(2).double(), "float32[2] and float64[2]"),
        (0.1, 0.2, "float 0.1 and float 0.2"),
    ],
    ids=["values", "shapes", "dtypes", "settings"],
)
def test_copies_that_differ_are_named_on_every_rank(one: Any, other: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"'m.x' is not the same on ranks 0 and 2 ({what})")):
        shares({"x": one}, {}, {"x": other})


def test_the_lowest_rank_writes_where_differences_are_allowed() -> None:
    written_by_ranks = shares({}, {"x": torch.zeros(2)}, {"x": torch.ones(2)}, replicas="first")
    assert [share.mine for share in written_by_ranks] == [(), ("m.x",), ()]


def test_the_error_is_one_of_partitas() -> None:
    assert issubclass(CheckpointError, PartitaError)
    assert issubclass(CheckpointError, ValueError)
