"""The module of a stage of ``frontend="modules"`` as a module among others: what it saves and loads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn

from partita import verify
from partita.pipelining import SplitPoint, pipeline


def test_a_stage_loads_a_plain_dict_of_its_own_state() -> None:
    """Batch norm takes a dict without versions for an old one, and adds its counter to it: that of another
    stage was "Unexpected key(s)".
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    split_spec = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec=split_spec, frontend="modules")
    for index in range(2):
        module = pipe.get_stage_module(index)
        values = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
        module.load_state_dict(values)
        assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"2\.weight\"\."):
            module.load_state_dict(values | {"2.weight": torch.ones(4)})


def test_a_stage_loads_a_plain_dict_without_what_a_layer_of_another_stage_asks_an_old_one_for() -> None:
    """The hook of ``spectral_norm`` named its weights as missing, in each stage that has not got them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    cuts = {"0": SplitPoint.END, "1": SplitPoint.END}
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec=cuts, frontend="modules")
    for stage in range(3):
        module = pipe.get_stage_module(stage)
        values = {name: value * 0.5 for name, value in module.state_dict().items()}
        module.load_state_dict(values)
        assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
        with pytest.raises(RuntimeError, match=f'"{stage}.bias"'):
            module.load_state_dict({name: value for name, value in values.items() if "bias" not in name})


def test_layers_of_other_stages_are_reset_there_and_statistics_can_be_computed_anew() -> None:
    """`update_bn` ended in "'NoneType' object has no attribute 'zero_'"."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    split_spec = {"2": SplitPoint.BEGINNING}
    example = (torch.randn(2, 4),)
    pipe = pipeline(copy.deepcopy(model), example, split_spec=split_spec, frontend="modules")
    batches = [torch.randn(8, 4) for _ in range(3)]
    for module in (pipe, model):
        module(batches[0])
        update_bn(batches, module)
    for index in range(2):
        stage = pipe.get_stage_module(index)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in stage.state_dict().items())
        for layer in copy.deepcopy(stage).modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


class _SavesItself(nn.Linear):
    """Like the linear layer of torch_geometric."""

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()


def test_layers_that_save_themselves_are_saved_by_their_own_stage_only() -> None:
    """``state_dict()`` ended in "'NoneType' object has no attribute 'detach'"."""
    model = nn.Sequential(_SavesItself(4, 4, bias=False), _SavesItself(4, 4, bias=False))
    split_spec = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec=split_spec, frontend="modules")
    for index in range(2):
        for module in (pipe.get_stage_module(index), copy.deepcopy(pipe.get_stage_module(index))):
            assert list(module.state_dict()) == [f"{index}.weight"]
            module.load_state_dict(module.state_dict())


def _normed(layer: nn.Linear) -> nn.Module:
    return cast("nn.Module", nn.utils.weight_norm(layer))


def _pruned(layer: nn.Linear) -> nn.Module:
    return cast("nn.Module", prune.l1_unstructured(layer, "weight", 0.5))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", [_normed, nn.utils.spectral_norm, _pruned])
def test_stages_with_computed_weights_are_copied_after_a_call(
    change: Callable[[nn.Linear], nn.Module],
) -> None:
    """A copy ended in torch's "Only Tensors created explicitly by the user (graph leaves) ..."."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(change(nn.Linear(4, 4)) for _ in range(2))), torch.randn(3, 4)
    split_spec = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (x,), split_spec=split_spec, frontend="modules")
    pipe(x).square().sum().backward()
    twin = copy.deepcopy(pipe)
    stages = [copy.deepcopy(pipe.get_stage_module(index)).code_that_runs for index in range(2)]
    for index, own in enumerate((twin.get_stage_module(0).code_that_runs, stages[1])):
        assert torch.equal(own[index].weight, pipe.get_stage_module(index).code_that_runs[index].weight)
        assert own[index].weight is not pipe.get_stage_module(index).code_that_runs[index].weight
    pipe.zero_grad(), twin.zero_grad()
    for module in (pipe, twin):
        module(x).square().sum().backward()
    expected = {name: value.grad for name, value in pipe.named_parameters()}
    assert_equal({name: value.grad for name, value in twin.named_parameters()}, expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not torch.equal(twin.eval()(x), pipe.eval()(x))


class _Rotary(nn.Module):
    """Like the rotary embeddings of transformers 4: a buffer that a plain attribute names once more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(4), persistent=False)
        self.original: torch.Tensor | None = self.frequencies
        self.last = self.frequencies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach()
        return torch.cos(self.frequencies) * x


def test_another_name_of_another_stages_buffer_is_no_tensor_there() -> None:
    """The attribute was a tensor of the meta device, which `verify` found and could not compare."""
    model = nn.Sequential(_Rotary(), nn.Linear(4, 4))
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"1": SplitPoint.BEGINNING}, frontend="modules")
    comparison = verify(pipe, model, (torch.randn(3, 4),))
    assert comparison
    assert not comparison.without_elements
    for stages in (pipe, copy.deepcopy(pipe)):
        first, second = (stages.get_stage_module(index).code_that_runs[0] for index in range(2))
        assert first.original is first.frequencies
        assert second.original is None


class _Busy(nn.Module):
    """Has attributes that a stage's module once had for itself, one of its class, and one with a setter."""

    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stage = self.device = self.cut = self.root = self._heat = 1.0

    @property
    def heat(self) -> float:
        return self._heat

    @heat.setter
    def heat(self, heat: float) -> None:
        self._heat = heat

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x) * self.stage * self.device * self.cut * self.root
        return self.head(x * self._heat * self.strength)


@pytest.mark.parametrize("name", ["stage", "device", "cut", "root", "heat", "strength"])
def test_an_attribute_of_the_model_is_its_own_whatever_its_name(name: str) -> None:
    model, x = _Busy(), torch.randn(4, 4)
    pipe = pipeline(model, (x,), split_spec={"head": SplitPoint.BEGINNING}, frontend="modules", prove=False)
    assert torch.equal(pipe(x), model(x))
    setattr(model, name, 3.0)
    setattr(pipe.get_stage_module(0), name, 3.0)
    assert torch.equal(pipe(x), model(x))
