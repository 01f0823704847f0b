"""FSDP1 and FSDP2 on two processes under ``torch.compile``: graphs, borders, and the unsharded model's
results.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld, patience
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from partita.errors import CaptureError
from partita.fsdp import audit, split_points_at_fsdp
from partita.pipelining import SplitPoint, pipeline

pytestmark = pytest.mark.timeout(200)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, Any]:
    """Losses, and gradients and weights at the end, by name as the plain model has it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    with whole(getattr(model, "_orig_mod", model)) as parameters:
        gradients = {name: full(value.grad).tolist() for name, value in parameters.items()}
        weights = {name: full(value.detach()).tolist() for name, value in parameters.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


@contextmanager
def whole(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The parameters as the plain model calls them; those of FSDP1 are gathered meanwhile."""
    gathered = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if gathered else nullcontext():
        yield {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def work(gm: torch.fx.GraphModule) -> list[str]:
    """The operators of a graph, without those that hand tuples apart."""
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def unmark(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(name, None)


def sharded(comm: Any, kind: str, *, marked: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Model()
    model = copy.deepcopy(reference)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    if kind == "fsdp1":
        wrapped: nn.Module = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    if not marked:
        unmark(wrapped)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(wrapped, backend=backend)
    # every rank takes the same batch, so the mean of the gradients is that of one
    trained, expected = train(compiled, batches), train(reference, batches)
    outcome = audit(wrapped)
    return {
        "trained": trained,
        "expected": expected,
        "inputs": [len(gm.graph.find_nodes(op="placeholder")) for gm in graphs],
        "held": [len([*gm.parameters(), *gm.buffers()]) for gm in graphs],
        "work": [work(gm) for gm in graphs],
        "unsharded": graphs_of(copy.deepcopy(reference), batches[0]),
        "ok": outcome.ok,
        "managed": outcome.managed,
        "borders": split_points_at_fsdp(wrapped),
    }


def graphs_of(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """How many graphs ``torch.compile`` makes, and how often it says that one is broken off."""
    count = 0

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        nonlocal count
        count += 1
        return gm.forward

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(model, backend=backend)(x)
    return count, sum(torch._dynamo.utils.counters["graph_break"].values())


def flat(comm: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    wrapped = FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=False,
        device_id=torch.device("cpu"),
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        graphs, breaks = graphs_of(wrapped, torch.randn(4, 8))
    with pytest.warns(UserWarning, match="wrapped with use_orig_params=False, so torch.compile makes no"):
        outcome = audit(wrapped)
    try:
        outcome.check()
    except CaptureError as error:
        message = str(error)
    else:
        message = ""
    words = " ".join(str(item.message) for item in warned)
    return {"graphs": graphs, "breaks": breaks, "words": words, "eager": outcome.eager, "message": message}


def late(comm: Any, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    if kind == "fsdp1":
        wrapped: nn.Module = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            ignored_modules=[model.layers[0].up],
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    before = audit(wrapped)
    model.layers[1].extra = nn.Dropout(0.0)
    return {"before": before.missed, "ignored": before.ignored, "after": audit(wrapped).missed}


def staged(comm: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Model(4)
    x = torch.randn(4, 8)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    sharded_model = copy.deepcopy(reference)
    for layer in sharded_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded_model, mesh=mesh)
    borders = split_points_at_fsdp(sharded_model, num_stages=2)
    pipe = pipeline(
        copy.deepcopy(reference),
        (x,),
        split_spec={name: SplitPoint[place] for name, place in borders.items()},
    )
    stages = [pipe.get_stage_module(index) for index in range(2)]
    names = [
        sorted({name.rpartition(".")[0][:8] for name, _ in stage.named_parameters()}) for stage in stages
    ]
    for stage in stages:  # each stage is sharded by itself: no shard lies on two of them
        fully_shard(stage, mesh=mesh)
    result, expected = stages[1](stages[0](x)), reference(x)
    result.square().mean().backward()
    expected.square().mean().backward()
    gradients = dict(reference.named_parameters())
    same = [
        torch.equal(parameter.grad.full_tensor(), gradients[name].grad)
        for stage in stages
        for name, parameter in stage.named_parameters()
    ]
    return {
        "borders": borders,
        "stages": pipe.num_stages,
        "names": names,
        "equal": torch.equal(result, expected),
        "gradients": same,
    }


def everything(comm: Any) -> dict[str, Any]:
    """All cases in one pair of processes: to start it costs more than any of them."""
    return {
        "fsdp1 trained": sharded(comm, "fsdp1"),
        "fsdp2 trained": sharded(comm, "fsdp2"),
        "fsdp1 unmarked": sharded(comm, "fsdp1", marked=False),
        "fsdp2 unmarked": sharded(comm, "fsdp2", marked=False),
        "flat": flat(comm),
        "fsdp1": late(comm, "fsdp1"),
        "fsdp2": late(comm, "fsdp2"),
        "staged": staged(comm),
    }


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    with patience(150.0):
        return ProcessWorld(2).run(everything)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_sharded_compiled_model_trains_like_the_unsharded_one(
    kind: str, cases: list[dict[str, Any]]
) -> None:
    for case in cases:
        result = case[f"{kind} trained"]
        assert result["trained"]["losses"] == pytest.approx(result["expected"]["losses"], rel=1e-6)
        for what in ("gradients", "weights"):
            actual, expected = result["trained"][what], result["expected"][what]
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    torch.tensor(actual[name]), torch.tensor(value), rtol=1e-6, atol=1e-7
                )
        assert result["ok"], result
        assert {"layers.0", "layers.0.up", "layers.1.down"} <= set(result["managed"])
        assert result["borders"] == {"layers.0": "BEGINNING", "layers.1": "BEGINNING"}
        # one graph a block: the break is at the border; its four parameters and x are inputs
        assert result["inputs"] == [5, 5]
        assert result["held"] == [0, 0]
        assert result["work"] == [["linear", "relu", "linear", "add"]] * 2
        assert result["unsharded"] == (1, 0)  # graphs and breaks, where there are no borders


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_marks_change_neither_graphs_nor_results(kind: str, cases: list[dict[str, Any]]) -> None:
    """FSDP's hooks break the graph, marked or not, and Dynamo makes inputs of every module's parameters."""
    for case in cases:
        marked, unmarked = case[f"{kind} trained"], case[f"{kind} unmarked"]
        assert unmarked["managed"] == ()
        for what in ("inputs", "held", "work", "trained"):
            assert marked[what] == unmarked[what]


def test_use_orig_params_false_makes_no_graph_and_the_audit_says_so(cases: list[dict[str, Any]]) -> None:
    """Torch runs the model eagerly, and no warning tells; one who asks its counters finds a break."""
    for case in cases:
        result = case["flat"]
        assert result["graphs"] == 0
        assert result["breaks"] <= 1
        assert "use_orig_params" not in result["words"]
        assert {"layers.0", "layers.1.up"} <= set(result["eager"])
        assert "use_orig_params=False, so torch.compile makes no graph of them" in result["message"]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_module_that_was_added_after_wrapping_is_missed(kind: str, cases: list[dict[str, Any]]) -> None:
    """Torch neither annotates it nor tells anybody."""
    for case in cases:
        result = case[kind]
        assert result["before"] == ()
        assert result["after"] == ("layers.1.extra",)
        assert result["ignored"] == (("layers.0.up",) if kind == "fsdp1" else ())


def test_a_pipeline_cut_at_the_borders_has_stages_that_are_sharded_by_themselves(
    cases: list[dict[str, Any]],
) -> None:
    for case in cases:
        result = case["staged"]
        assert result["borders"] == {"layers.2": "BEGINNING"}
        assert result["stages"] == 2
        assert result["names"] == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
        assert result["equal"]
        assert len(result["gradients"]) == 16
        assert all(result["gradients"])
