"""Optimizer state finds its parameter again, however parameters are grouped and named."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.contents.optimizer_state import state_places


def stepped(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def test_groups_may_be_cut_otherwise(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path, model, stepped(model, Adam(model.parameters(), lr=0.3, betas=(0.5, 0.6))))
    apart = [Adam([other.bias], lr=1.0), Adam([other.weight], lr=2.0)]
    load_checkpoint(tmp_path, other, apart)
    assert [(o.param_groups[0]["lr"], o.param_groups[0]["betas"]) for o in apart] == [(0.3, (0.5, 0.6))] * 2
    assert float(apart[0].state[other.bias]["exp_avg"][0]) == 1.0
    assert float(apart[1].state[other.weight]["exp_avg"][0, 0]) == 0.5


def test_one_group_of_parameters_that_were_trained_differently_is_an_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    save_checkpoint(tmp_path, model, SGD(groups))
    message = (
        r"'weight' and 'bias' are in one param group, but the checkpoint has lr = 0.1 for one and 0.2 for"
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, model, SGD(model.parameters(), lr=0.1))


def test_named_optimizers_and_a_learning_rate_in_a_tensor_are_kept(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = Adam(model.named_parameters(), lr=torch.tensor(0.25))
    save_checkpoint(tmp_path, model, stepped(model, optimizer))
    into = Adam(other.named_parameters(), lr=torch.tensor(0.5))
    load_checkpoint(tmp_path, other, into)
    assert torch.equal(into.param_groups[0]["lr"], torch.tensor(0.25))
    assert into.param_groups[0]["param_names"] == ["weight", "bias"]


def test_counters_stay_where_the_optimizer_wants_them(tmp_path: Path) -> None:
    """A parameter of one number has the shape of a step counter."""
    model, other = nn.ParameterList([torch.zeros(())]), nn.ParameterList([torch.zeros(())])
    save_checkpoint(tmp_path, model, stepped(model, Adam(model.parameters())))
    into = Adam(other.parameters())
    load_checkpoint(tmp_path, other, into)
    assert into.state[other[0]]["step"].item() == 1.0
    assert float(stepped(other, into).state[other[0]]["step"]) == 2.0


def test_a_parameter_of_no_stage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"a parameter of shape \[3, 3\] that none of the given stages hold"
    ):
        save_checkpoint(tmp_path, nn.Linear(2, 2), SGD(nn.Linear(3, 3).parameters()))


class _Nested(SGD):
    """Keeps containers for each parameter, as SOAP, AggMo and DASH do, and a number for all, as MADGRAD."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.state["k"] = torch.zeros((), dtype=torch.int64)  # type: ignore[index]
        for group in self.param_groups:
            group["schedule"] = {"warm": 3, "sizes": [torch.ones(2), 2]}

    def step(self, closure: Any = None) -> Any:
        self.state["k"] += 1  # type: ignore[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {
                    "blocks": [parameter.detach() * 2, [], (torch.ones(1), None)],
                    "by_beta": {0.9: parameter.grad, "few": [1, 2.5]},
                    "numbers": [0.5, 1],
                }
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_containers_and_what_all_parameters_share_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    """Containers were refused, or came back in pieces; what is shared was left out, without a word."""
    model, other = nn.Linear(2, 3, dtype=dtype), nn.Linear(2, 3, dtype=dtype)
    optimizer, into = _Nested(model.parameters()), _Nested(other.parameters())
    save_checkpoint(tmp_path, model, stepped(model, optimizer))
    load_checkpoint(tmp_path, other, into)
    for kind in ("state", "param_groups"):
        assert verify_equal(optimizer.state_dict()[kind], into.state_dict()[kind])
    assert into.state[other.weight]["blocks"][2][0].dtype == torch.float32


@pytest.mark.parametrize(
    "value",
    [OrderedDict(weight=torch.ones(2)), OrderedDict(few=1), {"tensor": torch.ones(2)}, [{"tensor": "x"}]],
)
def test_a_container_comes_back_under_its_own_key(tmp_path: Path, value: Any) -> None:
    """An `OrderedDict` came back as ``value.weight``, and a dict with a ``"tensor"`` could not be read."""
    model = nn.Linear(2, 3)
    optimizer, into = SGD(model.parameters()), SGD(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"value": value}
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, into)
    assert into.state[model.weight].keys() == {"value"}
    if isinstance(value, dict):  # torch takes text in a list apart
        assert verify_equal(into.state[model.weight]["value"], value)


def verify_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(verify_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and all(map(verify_equal, left, right))
    return bool(left == right)


def test_what_is_shared_goes_to_all_optimizers_of_another_cut_and_must_agree(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    apart = [_Nested([model.weight]), _Nested([model.bias])]
    stepped(model, apart[0])
    save_checkpoint(tmp_path / "unlike", model, apart)
    with pytest.raises(CheckpointError, match=r"'weight' and 'bias' are in one optimizer, .* has k = "):
        load_checkpoint(tmp_path / "unlike", model, _Nested(model.parameters()))
    stepped(model, apart[1])
    save_checkpoint(tmp_path / "alike", model, apart)
    into = _Nested(model.parameters())
    load_checkpoint(tmp_path / "alike", model, into)
    assert into.state["k"] == 1  # type: ignore[index]


def test_names_with_dots_are_told_apart_from_what_is_behind_them() -> None:
    keys = ["a.step", "a.b.step", "a.b.c.step", "other.step"]
    assert state_places(keys, ["a.b", "a"]) == {
        "a": {"step": "a.step"},
        "a.b": {"step": "a.b.step", "c.step": "a.b.c.step"},
    }


def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    def tied(*names: str) -> tuple[nn.Module, Tensor]:
        parameter = nn.Parameter(torch.ones(2))
        model = nn.Module()
        for name in names:
            model.register_parameter(name, parameter)
        return model, parameter

    (model, _), (other, parameter) = tied("a", "b"), tied("b")
    save_checkpoint(tmp_path, model, stepped(model, Adam(model.parameters(), lr=0.5)))
    into = Adam(other.parameters())
    load_checkpoint(tmp_path, other, into)
    assert float(into.state[parameter]["exp_avg"][0]) == pytest.approx(0.1)
    assert into.param_groups[0]["lr"] == 0.5
