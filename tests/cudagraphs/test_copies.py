"""Regions and compiled models that are copied or pickled: the graph goes along, recordings stay."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from partita.cudagraphs import CudaGraphModule, CudaGraphsBackend, CudaRecorder, ReplayRecorder
from partita.splitter import split


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).relu()


def recorded() -> CudaGraphModule:
    """A piece as a cut makes it: it holds the module's parameters and buffers."""
    torch.manual_seed(0)
    piece = split(symbolic_trace(Net()), lambda _node: 0).pieces[0].module
    region = CudaGraphModule(piece, recorder=ReplayRecorder(), max_recordings=3, name="region_5")
    with torch.no_grad():
        for _ in range(4):
            region(torch.randn(3, 4))
    return region


def pickled(region: CudaGraphModule) -> CudaGraphModule:
    return pickle.loads(pickle.dumps(region))


def saved(region: CudaGraphModule) -> CudaGraphModule:
    file = io.BytesIO()
    torch.save(region, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved])
def test_a_copy_has_the_graph_and_records_anew(how: Any) -> None:
    region = recorded()
    twin = how(region)
    info = twin.cache_info()
    assert (info.size, info.hits, info.recorded, info.max_size) == (0, 0, 0, 3)
    assert twin.region == "region_5"
    assert twin.recorder is not region.recorder
    assert region.cache_info().hits == 2  # the original goes on as before
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(twin(x), region(x))
    assert twin.cache_info().hits == 2
    for name, value in region.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])


def test_a_copy_shares_no_memory_with_the_original() -> None:
    region = recorded()
    twin = copy.deepcopy(region)
    with torch.no_grad():
        twin.gm.linear.weight.zero_()
    ours = {parameter.data_ptr() for parameter in region.parameters()}
    assert ours.isdisjoint(parameter.data_ptr() for parameter in twin.parameters())
    assert region.gm.linear.weight.abs().sum() > 0


def test_a_compiled_inside_stays_behind_and_the_copy_runs_the_graph() -> None:
    gm = symbolic_trace(lambda x: x + 1)
    region = CudaGraphModule(gm, recorder=ReplayRecorder(), run=lambda x: x + 1)
    assert pickled(region)(torch.zeros(1)).item() == 1.0


def test_a_captured_graph_goes_to_another_process_whole() -> None:
    gm = make_fx(lambda x: x.sin().cos().sin().cos().sin().cos(), tracing_mode="fake")(torch.zeros(2))
    captured = CudaGraphsBackend(recorder="replay").capture(gm)
    twin = pickle.loads(pickle.dumps(captured))
    x = torch.randn(2)
    for _ in range(4):
        assert torch.equal(twin(x), captured(x))
    assert [module.cache_info().hits for module in twin.modules() if isinstance(module, CudaGraphModule)] == [
        2
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_recorder_for_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="CudaRecorder needs a CUDA device"):
        CudaRecorder()
