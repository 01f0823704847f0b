from __future__ import annotations

import pytest
from torch import nn

from partita.fsdp import borders, split_points_at_fsdp


class Border(nn.Linear):
    """Stands for a sharded module: making a real one takes a process group."""


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borders, "is_border", lambda module: isinstance(module, Border))


def model(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), *(Border(2, size) for size in sizes))


def test_every_border_begins_a_stage() -> None:
    assert split_points_at_fsdp(model(2, 2)) == {"1": "BEGINNING", "2": "BEGINNING"}


def test_a_border_inside_of_a_border_is_none() -> None:
    outer = Border(2, 2)
    outer.inner = Border(2, 2)
    assert split_points_at_fsdp(nn.Sequential(outer)) == {"0": "BEGINNING"}


def test_stages_get_shares_of_the_parameters_as_equal_as_can_be() -> None:
    # before each border: 24, 384, 744, 768 bytes of 792; halves are nearest at the second
    assert split_points_at_fsdp(model(30, 30, 2, 2), num_stages=2) == {"2": "BEGINNING"}


def test_as_many_stages_as_borders_allow_take_all_of_them() -> None:
    assert list(split_points_at_fsdp(model(30, 2, 2), num_stages=4)) == ["1", "2", "3"]


def test_more_stages_than_borders_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages need 3 borders, and FSDP has 2"):
        split_points_at_fsdp(model(2, 2), num_stages=4)
    with pytest.raises(ValueError, match="num_stages is 0"):
        split_points_at_fsdp(model(2), num_stages=0)
