from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.errors import CaptureError
from partita.pipelining import pipeline
from partita.pipelining.frontends.modules.twin import own_parameters, twin_of


class Clones(nn.Linear):
    """Makes copies in its own way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Clones:
        twin = Clones(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


class Hands(Clones):
    """Hands its memo on."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hands:
        twin = Hands(self.in_features, self.out_features)
        twin._parameters = copy.deepcopy(self._parameters, memo)
        return twin


class Two(nn.Module):
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.first, self.last = kind(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def test_a_twin_has_the_tensors_that_it_is_given() -> None:
    model = Two(Hands)
    own = own_parameters(model)
    twin = twin_of(model, own)
    assert [id(one) for one in twin.parameters()] == [id(own[id(one)]) for one in model.parameters()]


class Computes(Two):
    """Shows a tensor among its buffers that it makes each time."""

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield "norm", self.last.weight.detach().norm()
        yield from super().named_buffers(*args, **kwargs)


def test_a_class_may_make_what_it_shows_among_its_buffers() -> None:
    """It ended in a KeyError."""
    assert pipeline(Computes(nn.Linear), (torch.randn(2, 4),), stages=2, frontend="modules").num_stages == 2


def test_a_class_that_copies_its_parameters_in_its_own_way_is_refused() -> None:
    """Each stage had its own copy of them, which nobody trained, beside the one that was trained."""
    x = torch.randn(2, 4)
    message = r"a copy of Two has a tensor of its own for 'first\.weight'.*Leave frontend= out"
    with pytest.raises(CaptureError, match=message):
        pipeline(Two(Clones), (x,), stages=2, frontend="modules")
    assert pipeline(Two(Clones), (x,), stages=2).num_stages == 2
    assert pipeline(Two(Hands), (x,), stages=2, frontend="modules").num_stages == 2
