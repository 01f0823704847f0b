"""Equally named calls in another order are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.errors import ExecutionError
from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.blocks.replaying.calls_digest import CallsDigest, CallsOfPass
from partita.pipelining.blocks.replaying.numbered_tensors import NumberedTensors


def _calls(rows: Sequence[tuple[str, Sequence[Tensor], Sequence[Any]]], state: dict[int, str]) -> CallsOfPass:
    tensors = NumberedTensors()
    digest = CallsDigest(tensors, state)
    for name, operands, numbers in rows:
        for operand in operands:
            if tensors.number_of(operand) is None:
                number = tensors.add(operand, (), ghost=False)
                if id(operand) in state:
                    tensors.state.add(number)
        digest.note(name, operands, (*operands, *numbers), {})
    return digest.calls


def test_operands_count_by_number_and_state_by_name() -> None:
    x, y, one, two = torch.zeros(4).unbind()
    state = {id(one): "one", id(two): "two"}
    calls = _calls([("mul", [x, one], ()), ("mul", [y, two], ())], state)
    assert calls.are_equal(_calls([("mul", [y, one], ()), ("mul", [x, two], ())], state))
    assert not calls.are_equal(_calls([("mul", [x, two], ()), ("mul", [y, one], ())], state))
    assert not calls.are_equal(_calls([("mul", [x, one], ()), ("mul", [x, two], ())], state))


def test_numbers_count_in_another_order_and_not_where_one_has_changed() -> None:
    x = torch.zeros(())
    calls = _calls([("mul", [x], (1.0,)), ("mul", [x], (2.0,))], {})
    assert not calls.are_equal(_calls([("mul", [x], (2.0,)), ("mul", [x], (1.0,))], {}))
    assert calls.are_equal(_calls([("mul", [x], (1.0,)), ("mul", [x], (3.0,))], {}))


class _Tables(nn.Module):
    """Two tables, made in the order of a list, which stands for a set of strings."""

    def __init__(self, *, of_state: bool) -> None:
        super().__init__()
        self.order = ["full", "sliding"]
        self.numbers = {"full": 0.5, "sliding": 2.0}
        self.of_state = of_state
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("full", torch.randn(4))
        self.register_buffer("sliding", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        tables = {}
        for name in self.order:
            tables[name] = torch.mul(x, getattr(self, name) if self.of_state else self.numbers[name])
        x = self.first(x)
        result: Tensor = self.last(x + tables["full"]) * tables["sliding"]
        return result


@pytest.mark.parametrize("of_state", [True, False], ids=["buffers", "numbers"])
def test_a_stage_whose_code_goes_through_a_set_in_another_order_is_refused(of_state: bool) -> None:
    """It got the tables of each other, without a word: each process has its own order of strings."""
    model, x = _Tables(of_state=of_state), torch.randn(2, 4)
    pipe = pipeline(model, (x,), split_spec={"last": SplitPoint.BEGINNING}, frontend="modules")
    assert torch.equal(pipe(x), model(x))
    pipe.get_stage_module(1).order.reverse()
    with pytest.raises(
        ExecutionError, match=r"in another order. Where it goes through a set .*PYTHONHASHSEED=0"
    ):
        pipe(x)
