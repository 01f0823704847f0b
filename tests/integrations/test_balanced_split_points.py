"""Stages of about equal numbers of bytes."""

from __future__ import annotations

import pytest
from torch import nn

from partita.errors import InfeasiblePlan
from partita.integrations.balanced_split_points import balanced_split_points


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 8)


def test_stages_have_about_as_many_bytes() -> None:
    model = nn.Sequential(*(Block(width) for width in (8, 8, 8, 24)))
    assert balanced_split_points(model, 2, ["Block"]) == ["3"]


def test_modules_of_named_classes_stay_whole() -> None:
    model = nn.Sequential(Block(4), Block(64))
    assert balanced_split_points(model, 2, ["Block"]) == ["1"]
    assert balanced_split_points(model, 2) == ["1.second"]


def test_a_tied_parameter_counts_where_it_is_first() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model[2].bias = model[0].bias
    assert balanced_split_points(model, 2) == ["1"]
    with pytest.raises(InfeasiblePlan, match="3"):
        balanced_split_points(model, 3)
