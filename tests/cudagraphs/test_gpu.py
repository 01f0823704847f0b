"""On a real GPU. Not run yet: no machine that has run these tests had one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from partita.cudagraphs import CudaGraphsBackend, CudaRecorder, SavingModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(x).relu())
        on_host = hidden.detach().sum().cpu() * 2  # cuts the model in two
        return self.last(hidden * on_host.cuda().sigmoid())


@pytest.mark.parametrize("train", [False, True])
def test_replays_equal_the_model_as_it_is(train: bool) -> None:
    torch.compiler.reset()
    reference = Net().cuda().train(train)
    model = copy.deepcopy(reference)
    backend = CudaGraphsBackend(saving=SavingModel(launch_s=1.0, replay_s=0.0, min_launches=1))
    compiled = torch.compile(model, backend=backend)
    for step in range(5):
        x = torch.randn(16, 64, device="cuda")
        found = []
        for module in (compiled, reference):
            torch.manual_seed(step)
            with torch.set_grad_enabled(train):
                found.append(module(x))
                if train:
                    found[-1].square().mean().backward()
        assert torch.equal(*found)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert not train or torch.equal(ours.grad, theirs.grad)
    assert any(info.hits for graph in backend.graphs for info in graph.cache_info().values())


def test_capturing_runs_nothing() -> None:
    total = torch.zeros(2, device="cuda")
    recorder = CudaRecorder()
    recorder.warm_up(lambda: total.add_(1))
    recording = recorder.record(lambda: total.add_(1))
    assert total.tolist() == [1.0, 1.0]
    recording.replay()
    assert total.tolist() == [2.0, 2.0]
