"""One launch of two processes; what it found is looked at by one test a behaviour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from partita._torch.fake_module import run_on_fakes
from partita._torch.modules.unsharded_copy import unsharded_copy
from partita.runtime import Comm

CPU = torch.device("cpu")
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bfloat16 inside": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}
GROUPINGS = ("root", "each", "together")


def _model(grouping: str, policy: str, mesh: DeviceMesh) -> nn.Sequential:
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICIES[policy]}
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    if grouping == "each":
        for layer in model:
            fully_shard(layer, **how)
    elif grouping == "together":
        fully_shard([model[0], model[2]], **how)
    fully_shard(model, **how)
    return model


def _about(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _results(mesh: DeviceMesh) -> dict[str, Any]:
    """What copies return before the first forward pass, after it, and while parameters are whole."""
    results = {}
    x = torch.randn(6, 4)
    for grouping in GROUPINGS:
        for policy in POLICIES:
            model = _model(grouping, policy, mesh)
            said = [run_on_fakes(model, (x,), {}, CPU)[0]]
            result = model(x)
            said.append(run_on_fakes(model, (x,), {}, CPU)[0])
            result.sum().backward()
            model.unshard()
            said.append(run_on_fakes(model, (x,), {}, CPU)[0])
            model.reshard()
            sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
            results[grouping, policy] = ([_about(one) for one in said], _about(result), sharded)
    return results


class _Tied(nn.Linear):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.other = self.weight


def _copies(mesh: DeviceMesh) -> dict[str, Any]:
    model = nn.Sequential(fully_shard(_Tied(), mesh=mesh), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda _, __, output: output.double())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        twin = unsharded_copy(model, mode)
    return {
        "class": type(twin[0]) is _Tied and isinstance(model[0], FSDPModule),
        "tied": twin[0].weight is twin[0].other,
        "whole": tuple(twin[0].weight.shape),
        "hooked": run_on_fakes(model[0], (torch.empty(2, 4),), {}, CPU)[0].dtype,
    }


def _tensor_parallel() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    for name, value in list(model.named_parameters()):
        spread = distribute_tensor(value.detach(), mesh["tp"], [Replicate()])
        setattr(model, name, nn.Parameter(spread))
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(NotImplementedError) as refusal:
        run_on_fakes(model, (torch.empty(2, 4),), {}, CPU)
    return str(refusal.value)


def _body(_: Comm) -> tuple[dict[str, Any], dict[str, Any], str]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    return _results(mesh), _copies(mesh), _tensor_parallel()


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any], str]:
    """What the first of two processes returns."""
    return ProcessWorld(2).run(_body)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_copy_returns_the_shapes_and_dtypes_of_the_sharded_module(
    grouping: str, policy: str, results: tuple[dict[str, Any], dict[str, Any], str]
) -> None:
    said, result, sharded = results[0][grouping, policy]
    assert said == [result] * 3
    assert sharded


def test_a_copy_is_of_the_modules_own_class_with_whole_tied_parameters_and_the_users_hooks(
    results: tuple[dict[str, Any], dict[str, Any], str],
) -> None:
    assert results[1] == {"class": True, "tied": True, "whole": (4, 4), "hooked": torch.float64}


def test_tensor_parallel_parameters_are_refused(results: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    assert results[2] == "tensor parallel parameters under fully_shard can't be made whole"
