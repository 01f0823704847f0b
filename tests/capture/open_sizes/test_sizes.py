from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.capture.open_sizes.sizes import Condition, Size, Sizes, Symbol, evaluated, sizes_of
from partita.errors import SignatureMismatch


@given(st.integers(1, 10**6))
def test_a_size_is_worked_out_from_the_sizes_of_inputs(batch: int) -> None:
    assert Size("2*batch + batch // 3").at({"batch": batch}) == 2 * batch + batch // 3
    assert evaluated((Size("batch"), 8, Size("max(batch, 4)")), {"batch": batch}) == (batch, 8, max(batch, 4))


def test_sizes_are_compared_by_their_text_and_shown_as_it() -> None:
    assert Size("batch") == Size("batch") != Size("x_0")
    assert repr((Size("batch"), 8)) == "(batch, 8)"
    assert pickle.loads(pickle.dumps(Size("2*batch"))).at({"batch": 3}) == 6


def test_a_condition_that_does_not_hold_names_sizes_and_line() -> None:
    sizes = Sizes(
        (Symbol("batch", "x", 0),), conditions=(Condition("batch != 1", "if n == 1:  # model.py:3"),)
    )
    sizes.check({"batch": 2})
    text = r"batch is 1, but .* captured for batch != 1 \(asked for by if n == 1:  # model.py:3\): use sizes"
    with pytest.raises(SignatureMismatch, match=text):
        sizes.check({"batch": 1})


def test_a_condition_of_one_mode_binds_in_that_mode_and_where_the_mode_is_not_known() -> None:
    train = Sizes(conditions=(Condition("batch != 1", "norm"), Condition("batch < 9", "both")))
    both = train.joined(Sizes(conditions=(Condition("batch < 9", "both"),)))
    assert {(c.text, c.training) for c in both.conditions} == {("batch != 1", True), ("batch < 9", None)}
    both.check({"batch": 1}, training=False)
    for training in (True, None):
        with pytest.raises(SignatureMismatch):
            both.check({"batch": 1}, training)


@pytest.mark.parametrize("asked", ["batch != 1", "batch > 1", "2 <= batch"])
def test_what_excluded_a_batch_of_one_alone_falls_out_where_one_is_proven(asked: str) -> None:
    waived = Condition(f"batch == 1 or ({asked})", "norm", strict=asked)
    other = Condition("batch == 1 or (batch % 2 == 0)", "view", strict="batch % 2 == 0")
    sizes = Sizes((Symbol("batch", "x", 0),), conditions=(waived, other)).with_one()
    assert [condition.text for condition in sizes.conditions] == [other.text]
    assert not sizes.waived


def test_one_sample_has_the_length_that_it_has() -> None:
    sizes = Sizes((Symbol("batch", "x", 0), Symbol("length", "x", 1)))
    assert sizes.of_one_sample({"batch": 3, "length": 7}) == {"batch": 1, "length": 7}
    assert Condition("max(batch, 2) * length != 8", "view").names == {"batch", "length"}


def test_sizes_are_read_from_inputs_by_name() -> None:
    symbols = (Symbol("batch", "x", 0), Symbol("length", "y", 1))
    flat = [torch.zeros(2, 3), 4, torch.zeros(5, 6)]
    assert sizes_of(symbols, ["x", "n", "y"], flat) == {"batch": 2, "length": 6}
    with pytest.raises(
        SignatureMismatch, match="'y' is a tensor of 1 dimensions, but the model was captured with a"
    ):
        sizes_of(symbols, ["x", "y"], [torch.zeros(2), torch.zeros(3)])
    with pytest.raises(SignatureMismatch, match="'x' is NoneType"):
        sizes_of(symbols, ["x", "y"], [None, None])


def test_sizes_that_are_one_in_another_graph_fall_out_where_they_were_divided_by_each_other() -> None:
    two = Sizes(
        (Symbol("rows", "x", 0), Symbol("batch", "y", 0)),
        {"view": (Size("batch"), Size("(48*rows) // batch"))},
        {"size": Size("rows")},
    )
    one = Sizes((Symbol("batch", "x", 0),), {"x": (Size("batch"), 4), "y": (Size("batch"), 8)})
    said = two.in_terms_of(one)
    assert said is not None
    assert said.symbols == one.symbols
    assert said.shapes == {"view": (Size("batch"), 48)}
    assert said.numbers == {"size": Size("batch")}
