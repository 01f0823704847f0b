"""Models that are cut without memory, and stages that get theirs afterwards."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.pipelining.models import CALLED, MASK, NORMED, REGIONS, TRANSFORMER, Case
from tests.pipelining.running import assert_equal, cut
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from partita.errors import CheckpointError
from partita.pipelining import Pipe, SplitPoint, pipeline
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.weight_files import load_safetensors
from partita.pipelining.stages.placing.materialise import materialise, parameters_on_meta


def without_memory(case: Case, stages: int) -> Pipe:
    """The case's model, built and cut on the meta device."""
    with torch.device("meta"):
        model = case.make()
    args, kwargs, _ = case.data(2)
    moved = [value.to("meta") if isinstance(value, Tensor) else value for value in args]
    named = {name: value.to("meta") for name, value in kwargs.items()}
    return pipeline(model, tuple(moved), named, split_spec=case.split_spec(stages))


def run(pipe: Pipe, case: Case) -> Any:
    """What the stages compute one after the other, with the same random numbers each time."""
    args, kwargs, _ = case.data(2, seed=3)
    torch.manual_seed(4)
    return pipe(*args, **kwargs)


@pytest.mark.parametrize("source", ["safetensors", "checkpoint"])
@pytest.mark.parametrize("case", [TRANSFORMER, NORMED, CALLED, REGIONS, MASK], ids=lambda case: case.name)
def test_a_stage_cut_without_memory_equals_one_cut_from_the_real_model(
    case: Case, source: str, tmp_path: Path
) -> None:
    stages = len(case.after) + 1
    real, empty = cut(case, stages), without_memory(case, stages)
    model = case.model()
    if source == "safetensors":
        save_file(
            {name: value.clone() for name, value in model.state_dict().items()},
            tmp_path / "model.safetensors",
        )
    else:
        save_checkpoint(tmp_path, model)
    for index in range(stages):
        stage = empty.build_stage(index)
        materialise(stage, init_buffers=model)
        if source == "safetensors":
            load_safetensors(stage, tmp_path)
        else:
            load_checkpoint(tmp_path, stage)
        module, expected = stage.module, real.get_stage_module(index)
        assert_equal(dict(module.named_buffers()), dict(expected.named_buffers()))
        assert_equal(dict(module.state_dict()), dict(expected.state_dict()))
        flags = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        assert flags == {n: p.requires_grad for n, p in expected.named_parameters(remove_duplicate=False)}
    assert_equal(run(empty, case), run(real, case))
    empty.eval()
    real.eval()
    assert_equal(run(empty, case), run(real, case))


class _Devices(nn.Module):
    """Makes tensors in forward, where its input lies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + torch.arange(4, device=x.device)
        with torch.no_grad():
            mask = torch.ones(4, 4, device=h.device, dtype=torch.bool).tril()
        return self.second(h) @ mask.to(h.dtype) + torch.zeros_like(h)


def test_tensors_that_the_graph_makes_follow_the_stage() -> None:
    with torch.device("meta"):
        model = _Devices()
        pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"first": SplitPoint.END})
    torch.manual_seed(0)
    real = _Devices()
    x = torch.randn(2, 4)
    h: Any = x
    for index in range(2):
        stage = pipe.build_stage(index)
        materialise(stage)
        stage.module.load_state_dict(
            {n: v for n, v in real.state_dict().items() if n in stage.module.state_dict()}
        )
        h = stage.module(h)
    assert torch.equal(h, real(x))


def test_missing_tables_are_named_before_anything_changes() -> None:
    stage = without_memory(TRANSFORMER, 2).build_stage(1)
    with pytest.raises(
        CheckpointError, match=r"nothing brings the non-persistent buffers or constants 'position',"
    ):
        materialise(stage)
    assert {p.device.type for p in stage.module.parameters()} == {"meta"}


@pytest.mark.parametrize("kind", ["function", "table", "module"])
def test_tables_come_from_a_function_a_table_or_a_module(kind: str) -> None:
    stage = without_memory(TRANSFORMER, 2).build_stage(1)
    with parameters_on_meta():
        source = TRANSFORMER.model()
    asked: list[str] = []

    def function(name: str) -> Tensor:
        asked.append(name)
        return source.get_buffer(name)

    materialise(
        stage,
        init_buffers={"function": function, "table": {"position": source.position}, "module": source}[kind],
    )
    assert torch.equal(stage.module.get_buffer("position"), source.position)
    assert stage.module.get_buffer("position") is not source.position
    assert asked == (["position"] if kind == "function" else [])


def test_a_table_that_does_not_fit_is_an_error_with_both_shapes() -> None:
    stage = without_memory(TRANSFORMER, 2).build_stage(1)
    message = "torch.float32 of shape [3] for 'position', which is torch.float32 of shape [6, 8]: bring what"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        materialise(stage, init_buffers=lambda name: torch.zeros(3))


def test_what_is_never_loaded_shows() -> None:
    layer = nn.BatchNorm1d(3, device="meta")
    materialise(layer)
    assert layer.weight.isnan().all()
    assert layer.running_mean.isnan().all()
    assert int(layer.num_batches_tracked) == torch.iinfo(torch.int64).min


class _Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.scale = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.scale + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def test_tensors_that_are_no_buffers_are_asked_for_too() -> None:
    with torch.device("meta"):
        pipe = pipeline(_Constants(), (torch.randn(2, 4),), stages=1)
    stage = pipe.build_stage(0)
    names = r"'lifted_tensor_0', 'inner\.scale'"
    with pytest.raises(CheckpointError, match=rf"or constants {names}, and no checkp"):
        materialise(stage)
    with parameters_on_meta():
        source = _Constants()
    source.lifted_tensor_0 = torch.tensor([1.0, 2.0, 3.0, 4.0])
    materialise(stage, init_buffers=source)
    real = _Constants()
    stage.module.load_state_dict(real.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(stage.module(x), real(x))


def test_ties_layouts_and_frozen_parameters_stay() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        model.register_parameter("turned", nn.Parameter(torch.empty(2, 5).t()))
        model.register_buffer("one", torch.zeros(2))
        model.register_buffer("other", model.one)
    materialise(model)
    assert model[1].weight is model[0].weight
    assert not model[0].bias.requires_grad
    assert model[1].bias.requires_grad
    assert model.turned.stride() == (1, 5)
    assert model.one is model.other


def test_what_has_memory_stays_as_it_is() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    layer.bias = nn.Parameter(torch.empty(2, device="meta"))
    materialise(layer)
    assert layer.weight is weight
    assert layer.bias.isnan().all()


def test_building_with_parameters_on_meta_keeps_ties_and_computes_buffers() -> None:
    with parameters_on_meta():
        model = TRANSFORMER.make()
        shared = nn.Parameter(torch.ones(2))
        model.register_parameter("left", shared)
        model.register_parameter("right", shared)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.head.weight is model.embedding.weight
    assert model.left is model.right
    assert model.position.device.type == "cpu"
    assert nn.Linear(1, 1).weight.device.type == "cpu"  # outside


def test_the_rest_of_the_model_is_freed_once_a_stage_is_built() -> None:
    model = TRANSFORMER.model()
    args, kwargs, _ = TRANSFORMER.data(2)
    pipe = pipeline(model, args, kwargs, split_spec=TRANSFORMER.split_spec(3))
    stage = pipe.build_stage(1)
    kept = {id(tensor) for tensor in (*stage.module.parameters(), *stage.module.buffers())}
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    memory = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in tensors.items()}
    own = {name for name, tensor in tensors.items() if id(tensor) in kept}
    whole, modules = weakref.ref(pipe.whole), [weakref.ref(module) for module in model.modules()]
    del model, pipe, tensors
    gc.collect()
    assert 5 < len(own) < len(memory) / 2
    assert {name for name, reference in memory.items() if not reference.expired()} == own
    assert whole() is None
    assert [reference() for reference in modules if reference() is not None] == []
