"""What partita reads from operator schemas."""

from __future__ import annotations

import operator

import pytest
import torch

from partita._torch.operators.schemas import (
    aten_packet,
    is_higher_order,
    is_in_place,
    is_operator,
    operator_facts,
    returns_one_tensor,
)

aten = torch.ops.aten


def test_operators_and_higher_order_operators_are_told_apart() -> None:
    assert is_operator(aten.add)
    assert is_operator(aten.add.Tensor)
    assert not is_operator(torch.add)
    assert is_higher_order(torch.ops.higher_order.cond)
    assert not is_higher_order(operator.add)


def test_a_packet_is_found_by_name() -> None:
    assert aten_packet("add") is aten.add
    assert aten_packet("no_such_operator") is None
    assert aten_packet("not an identifier") is None


def test_the_written_argument_of_an_in_place_operator_reaches_the_result() -> None:
    (facts,) = operator_facts(aten.add_.Tensor)
    assert [(a.name, a.position, a.written, a.aliased) for a in facts.arguments] == [("self", 0, True, True)]


def test_operators_in_place_return_what_they_write_to() -> None:
    assert all(map(is_in_place, (aten.add_.Tensor, aten.copy_.default, aten.unsqueeze_.default)))
    assert not any(
        map(is_in_place, (aten.add.Tensor, aten.view.default, aten.add.out, aten.batch_norm.default))
    )


def test_what_is_written_by_an_operator_that_returns_nothing_may_come_back_from_python() -> None:
    (facts,) = operator_facts(aten._foreach_add_.Scalar)
    assert [(a.name, a.written, a.aliased) for a in facts.arguments] == [("self", True, True)]


def test_undeclared_writes_and_aliases_are_known() -> None:
    (norm,) = operator_facts(aten.batch_norm.default)
    assert [a.name for a in norm.arguments if a.written] == ["running_mean", "running_var"]
    assert norm.switch == (5, "training")
    assert operator_facts(aten.broadcast_tensors.default)[0].may_alias_all


def test_list_methods_of_torchscript_are_left_out() -> None:
    assert all(
        "int" not in facts.name and not any(a.written for a in facts.arguments if a.name == "self")
        for facts in operator_facts(aten.sort)
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.mm, True),
        (aten.add_.Tensor, True),
        (aten.split, False),
        (aten.sort, False),
        (aten.chunk.default, False),
    ],
)
def test_a_single_tensor_is_told_from_several(target: object, expected: bool) -> None:
    assert returns_one_tensor(target) is expected


def test_a_seeded_tag_makes_an_operator_random() -> None:
    assert operator_facts(aten.rand.default)[0].random
    assert operator_facts(aten.lstm.input)[0].random
    assert not operator_facts(aten.mm.default)[0].random
