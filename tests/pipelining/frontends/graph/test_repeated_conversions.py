"""Conversions that change nothing do not cross: last bits of gradients differed where they did."""

from __future__ import annotations

import pytest
import torch
from tests.pipelining.order_of_sums import check_against_eager
from torch import Tensor, nn

from partita.pipelining import SplitPoint, pipeline


class Converts(nn.Module):
    """What the first stage converts is used by the others, beside what it was converted from."""

    def __init__(self, *, weight: bool = False, writes: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.weight, self.writes = weight, writes

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        shared = self.a.weight if self.weight else h
        same = shared.float().to(x.device)
        if self.writes:
            same.mul_(2)
        y = self.c(self.b(h) + torch.bmm(same[None], same[None])[0] + same * same)
        return y @ shared


WHERE = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("weight", [False, True], ids=["activation", "parameter"])
def test_gradients_are_added_up_in_the_order_of_the_model(weight: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = Converts(weight=weight), torch.randn(12, 6)
    check_against_eager(model, x, WHERE, compiled=compiled)


def test_one_value_is_sent_in_place_of_two() -> None:
    x = torch.randn(6, 6)
    pipe = pipeline(Converts(), (x,), split_spec=WHERE)
    assert [names for names in pipe.routes.forward.values() if len(names) > 1] == []
    assert {name.partition("_")[0] for name in pipe.routes.values}.isdisjoint({"to"})


def test_what_is_written_to_is_sent_as_it_is() -> None:
    x = torch.randn(6, 6)
    model = Converts(writes=True)
    pipe = pipeline(model, (x,), split_spec=WHERE)
    with torch.no_grad():
        assert torch.equal(pipe(x), model(x))
