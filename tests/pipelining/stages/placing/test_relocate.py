"""A stage on another device has tensors of its own; what it was built from stays where it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.pipelining.models import CALLED, TRANSFORMER, WIDTH
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.stages.placing.materialise import materialise
from partita.pipelining.stages.placing.move_graph import named_devices
from partita.pipelining.stages.placing.relocate import devices_of, relocated

META, CPU = torch.device("meta"), torch.device("cpu")


class Makes(nn.Module):
    """Makes tensors in forward, and holds one buffer under two names and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("again", self.table)
        self.shift = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.table + self.again * torch.arange(WIDTH, device=x.device)
        return self.b(h) + self.shift + torch.zeros(WIDTH, dtype=h.dtype, device=h.device)


def test_a_built_stage_leaves_the_users_model_and_the_pipe_where_they_are() -> None:
    """There, building a stage moves the parameters of the model that it was traced from."""
    model, x = Makes(), torch.randn(2, WIDTH)
    before, expected = copy.deepcopy(model.state_dict()), model(x)
    pipe = pipeline(model, (x,), split_spec={"a": SplitPoint.END})
    stage = pipe.build_stage(1, "meta")
    assert {value.device for value in stage.module.state_dict().values()} == {META}
    assert {value.device for value in model.state_dict().values()} == {CPU}
    assert_equal(dict(model.state_dict()), dict(before))
    assert torch.equal(pipe(x), expected)
    assert stage.module.get_buffer("table") is stage.module.get_buffer("again")
    assert stage.device == META


def test_tensors_that_the_graph_makes_or_holds_come_along() -> None:
    model, x = Makes(), torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"a": SplitPoint.END})
    h = torch.randn(2, WIDTH, device="meta")
    for index in range(2):
        module = pipe.build_stage(index, "meta").module
        assert CPU not in devices_of(module)
        assert CPU not in named_devices(module)
        h = module(h)
    assert h.shape == (2, WIDTH)


def test_a_stage_that_is_there_already_is_the_models_own() -> None:
    model = TRANSFORMER.model()
    pipe = pipeline(model, TRANSFORMER.data(2)[0], split_spec=TRANSFORMER.split_spec(2))
    stage = pipe.build_stage(0, "cpu")
    assert stage.module is pipe.get_stage_module(0)
    assert stage.module.get_parameter("embedding.weight") is model.embedding.weight


def test_tied_parameters_stay_tied_and_frozen_ones_frozen() -> None:
    model = CALLED.model()
    model.again = model.a
    model.b.requires_grad_(False)
    moved = relocated(model, META, {CPU})
    assert moved.again.weight is moved.a.weight
    assert moved.again.weight is not model.a.weight
    assert isinstance(moved.b.weight, nn.Parameter)
    assert not moved.b.weight.requires_grad
    assert [name for name, _ in moved.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_tensors_without_memory_are_left_for_materialise() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert relocated(model, CPU, {META}) is model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stage_on_the_gpu_computes_there_and_the_model_stays() -> None:
    model, x = Makes(), torch.randn(2, WIDTH)
    expected = model(x)
    pipe = pipeline(model, (x,), split_spec={"a": SplitPoint.END})
    h = x.cuda()
    for index in range(2):
        h = pipe.build_stage(index, "cuda").module(h)
    torch.testing.assert_close(h.cpu(), expected)
    assert model.a.weight.device == CPU


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_hooks_and_attributes_of_parameters_come_along(frontend: Any) -> None:
    """``model.to(device)`` keeps them; the optimizer of a stage on a GPU saw neither, without a word."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.register_hook(lambda gradient: 0 * gradient)
    model[1].weight.no_weight_decay = True
    pipe: Any = pipeline(model, (torch.ones(1, 2),), split_spec={"0": SplitPoint.END}, frontend=frontend)
    stage = pipe.build_stage(1, "meta")
    own = {name: value for name, value in stage.module.named_parameters() if name.startswith("1.")}
    assert own["1.weight"] is not model[1].weight
    assert own["1.weight"].no_weight_decay
    materialise(stage)
    weight = dict(stage.module.named_parameters())["1.weight"]
    assert weight.no_weight_decay
    weight.sum().backward()
    assert weight.grad.tolist() == [[0, 0], [0, 0]]
