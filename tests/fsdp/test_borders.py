from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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
    assert split_points_at_fsdp(nn.Sequential(outer, nn.Linear(2, 2))) == {"0": "BEGINNING"}


def test_a_root_inside_of_a_wrapper_is_none() -> None:
    """A module that computes the loss of a sharded model: two stages were cut at the model itself, which is
    one stage, and three were refused.
    """
    root = Border(2, 2)
    root.layers = model(2, 2)
    assert split_points_at_fsdp(nn.ModuleDict({"model": root, "loss": nn.MSELoss()}), num_stages=3) == {
        "model.layers.1": "BEGINNING",
        "model.layers.2": "BEGINNING",
    }


def test_a_border_in_a_wrapper_has_the_name_of_the_wrapper() -> None:
    """The model that is cut may lack the wrapper: "1._checkpoint_wrapped_module" named nothing in it."""
    layers = model(2)
    layers[1] = checkpoint_wrapper(layers[1])
    assert split_points_at_fsdp(layers) == {"1": "BEGINNING"}


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
