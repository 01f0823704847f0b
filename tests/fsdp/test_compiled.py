"""FSDP1 and FSDP2 on two processes under ``torch.compile``: graphs, borders, and the unsharded model's
results.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from partita.fsdp import audit, split_points_at_fsdp

pytestmark = pytest.mark.timeout(60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def sharded(comm: Any, kind: str) -> dict[str, Any]:
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
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(wrapped, backend=backend)
    # every rank takes the same batch, so the mean of the gradients is that of one
    losses, expected = train(compiled, batches), train(reference, batches)
    inputs = [len(gm.graph.find_nodes(op="placeholder")) for gm in graphs]
    held = [len([*gm.parameters(), *gm.buffers()]) for gm in graphs]
    found = audit(wrapped)
    return {
        "losses": losses,
        "expected": expected,
        "inputs": inputs,
        "held": held,
        "ok": found.ok,
        "managed": found.managed,
        "borders": split_points_at_fsdp(wrapped),
    }


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_sharded_compiled_model_trains_like_the_unsharded_one(kind: str) -> None:
    for result in ProcessWorld(2).run(sharded, kind):
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["ok"], result
        assert {"layers.0", "layers.0.up", "layers.1.down"} <= set(result["managed"])
        assert result["borders"] == {"layers.0": "BEGINNING", "layers.1": "BEGINNING"}
        # one graph a block: the break is at the border; its four parameters and x are inputs
        assert result["inputs"] == [5, 5]
        assert result["held"] == [0, 0]
