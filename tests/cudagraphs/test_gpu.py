"""On a real GPU.

Everything is asked of `DEVICE` with `OPTIONS`, so that the same code can be tried with a `ReplayRecorder`.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import AllWorthIt
from tests.on_gpu import DEVICE, NEEDS_CUDA, ON_GPU
from torch import nn

from partita.cudagraphs import (
    CudaGraphModule,
    CudaGraphsBackend,
    CudaGraphsRunner,
    CudaRecorder,
    SavingModel,
    explain,
)
from partita.cudagraphs.padding import PaddedGraph
from partita.errors import ExecutionError

pytestmark = ON_GPU

OPTIONS: dict[str, Any] = {}


def capturing(**options: Any) -> CudaGraphsBackend:
    torch.compiler.reset()
    return CudaGraphsBackend(saving=AllWorthIt(), **OPTIONS, **options)


def hits(backend: Any) -> int:
    return sum(info.hits for graph in backend.graphs for info in graph.cache_info().values())


class Net(nn.Module):
    """Random numbers, running statistics, and a copy to the host that cuts the model in two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        on_host = hidden.detach().sum().cpu() * 2
        return self.last(hidden * on_host.to(x.device).sigmoid())


def batch(step: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = Net().to(DEVICE)
    return copy.deepcopy(reference), reference


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for (name, ours), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("train", [False, True])
def test_replays_equal_the_model_as_it_is(train: bool) -> None:
    model, reference = pair()
    backend = capturing()
    compiled = torch.compile(model.train(train), backend=backend)
    reference.train(train)
    for step in range(5):
        results = []
        for module in (compiled, reference):
            torch.manual_seed(step)
            with torch.set_grad_enabled(train):
                results.append(module(batch(step)))
                if train:
                    results[-1].square().mean().backward()
        assert torch.equal(*results)
    assert_same(model, reference)
    assert hits(backend) > 2


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_optimizer_steps_alike_with_forwards_before_their_backwards(at_once: int) -> None:
    model, reference = pair()
    backend = capturing()
    for module, runner in ((model, torch.compile(model, backend=backend)), (reference, reference)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(6):
            torch.manual_seed(step)
            losses = [runner(batch(10 * step + number)).square().mean() for number in range(at_once)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, reference)
    overtaken = sum(info.overtaken for graph in backend.graphs for info in graph.cache_info().values())
    assert not overtaken
    assert hits(backend) > 2


def test_results_stay_as_they_were_returned() -> None:
    compiled = torch.compile(lambda x: (x.sin(), x.cos()), backend=capturing())
    batches = [batch(step) for step in range(5)]
    with torch.no_grad():
        results = [compiled(x) for x in batches]
    for x, (sine, cosine) in zip(batches, results, strict=True):
        assert torch.equal(sine, x.sin())
        assert torch.equal(cosine, x.cos())


def test_inputs_that_are_written_are_written() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sin())
        return total * 2

    compiled = torch.compile(step, backend=capturing())
    ours, theirs = (torch.zeros(16, 64, device=DEVICE) for _ in range(2))
    with torch.no_grad():
        for number in range(5):
            assert torch.equal(compiled(batch(number), ours), step(batch(number), theirs))
            assert torch.equal(ours, theirs)


def test_shapes_that_change_are_recorded_each() -> None:
    model, reference = pair()
    backend = capturing(max_recordings=2)
    compiled = torch.compile(model.eval(), backend=backend, dynamic=True)
    reference.eval()
    with torch.no_grad():
        for step, rows in enumerate((8, 16, 8, 16, 8, 16, 24, 24, 24)):
            assert torch.equal(compiled(batch(step, rows)), reference(batch(step, rows)))
    assert hits(backend) > 2


def test_a_number_on_the_host_is_taken_by_value() -> None:
    backend = capturing()
    compiled = torch.compile(lambda x, scale: (x * scale).sin(), backend=backend)
    with torch.no_grad():
        for number in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
            scale = torch.tensor(number)
            assert torch.equal(compiled(batch(0), scale), (batch(0) * scale).sin())
    assert not backend.graphs[0].plan.refusals


@NEEDS_CUDA
def test_inductor_compiles_the_pieces() -> None:
    model, reference = pair()
    backend = capturing(inner="inductor")
    compiled = torch.compile(model, backend=backend)
    for step in range(4):
        results = []
        for module in (compiled, reference):
            torch.manual_seed(step)
            results.append(module(batch(step)))
            results[-1].square().mean().backward()
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-2)
    assert hits(backend) > 2


def test_batches_are_padded_to_buckets() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE).eval()
    backend = capturing(buckets=(8, 16))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (8, 8, 16, 16, 3, 5, 11, 13, 16):
            x = batch(rows, rows)
            size = 8 if rows <= 8 else 16
            padded = x[[min(row, rows - 1) for row in range(size)]]
            assert torch.equal(compiled(x), model(padded)[:rows])
    assert isinstance(backend.graphs[0].padding, PaddedGraph)
    recorded = sum(info.recorded for info in backend.graphs[0].cache_info().values())
    assert recorded == 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: output.square().mean(),
        pytest.param(
            lambda output: output.sum(),
            marks=pytest.mark.xfail(
                reason="the last bits of a gradient differed on an H200; whether aot_eager's do was not asked"
            ),
        ),
    ],
    ids=["mean square", "sum"],
)
def test_a_stage_runs_through_the_runner(loss: Any) -> None:
    torch.compiler.reset()
    model, reference = pair()
    runner = CudaGraphsRunner(saving=AllWorthIt(), **OPTIONS)
    stage = runner.for_module(model)
    for step in range(4):
        for module in (stage, reference):
            torch.manual_seed(step)
            loss(module(batch(step))).backward()
    assert_same(model, reference)
    assert hits(runner) > 2


def test_a_copy_of_a_region_records_anew() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.sin().cos())
    recorder = OPTIONS["recorder"](DEVICE) if OPTIONS else CudaRecorder()
    region = CudaGraphModule(gm, recorder=recorder)
    with torch.no_grad():
        for _ in range(3):
            region(batch(0))
        twin = copy.deepcopy(region)
        for step in range(3):
            assert torch.equal(twin(batch(step)), region(batch(step)))
    assert twin.cache_info().recorded == 1


def test_what_is_explained_is_what_is_captured() -> None:
    model, _ = pair()
    saving = SavingModel(min_launches=1, replay_s=0.0)
    explanation = explain(model.eval(), (batch(0),), device=DEVICE, saving=saving)
    assert not explanation.assumed
    backend = CudaGraphsBackend(saving=saving, **OPTIONS)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(batch(0))
    ours = [[region.nodes for region in graph.plan.regions] for graph in explanation.graphs]
    assert ours == [[region.nodes for region in graph.plan.regions] for graph in backend.graphs]


# What follows is about CUDA alone.


def test_capturing_runs_nothing() -> None:
    total = torch.zeros(2, device="cuda")
    recorder = CudaRecorder()
    recorder.warm_up(lambda: total.add_(1))
    recording = recorder.record(lambda: total.add_(1))
    assert total.tolist() == [1.0, 1.0]
    recording.replay()
    assert total.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.cpu()],
    ids=["item", "nonzero", "mask", "cpu"],
)
def test_what_the_finder_leaves_out_fails_in_a_capture_and_the_next_one_works(function: Any) -> None:
    """Torch's partitioner proposes some of these for capture."""
    x = torch.randn(8, device="cuda")
    recorder = CudaRecorder()
    recorder.warm_up(lambda: function(x))
    with pytest.raises(ExecutionError, match="the region can't be captured"):
        recorder.record(lambda: function(x))
    torch.cuda.synchronize()
    recording = recorder.record(lambda: x.sin())
    recording.replay()
    assert torch.equal(recording.result, x.sin())


def test_random_numbers_go_on_over_replays() -> None:
    x = torch.ones(64, device="cuda")
    region = CudaGraphModule(
        torch.fx.symbolic_trace(lambda x: nn.functional.dropout(x, 0.5, True)), recorder=CudaRecorder()
    )
    with torch.no_grad():
        torch.manual_seed(0)
        actual = [region(x) for _ in range(5)]
        after = torch.rand(3, device="cuda")
        torch.manual_seed(0)
        expected = [nn.functional.dropout(x, 0.5, True) for _ in range(5)]
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(after, torch.rand(3, device="cuda"))


def test_torch_skips_the_whole_model_where_one_node_is_on_the_host() -> None:
    """``backend="cudagraphs"`` gives up; partita captures both sides."""
    model, _ = pair()
    model.eval()
    torch._dynamo.utils.counters.clear()
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend="cudagraphs")(batch(0))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] >= 1
    backend = capturing()
    with torch.no_grad():
        torch.compile(model, backend=backend)(batch(0))
    assert len(backend.graphs[0].plan.regions) == 2


def test_recordings_share_one_pool_and_free_it() -> None:
    square = torch.ones(8, 8, device="cuda")
    square @ square  # what cuBLAS works in is there from now on, in this stream
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    region = CudaGraphModule(
        torch.fx.symbolic_trace(lambda x: (x.sin() @ x.cos()).sum()),
        recorder=CudaRecorder(),
        max_recordings=8,
    )
    with torch.no_grad():
        for size in (256, 512, 1024, 1024, 512, 256):
            x = torch.randn(size, size, device="cuda")
            for _ in range(2):
                torch.testing.assert_close(region(x), (x.sin() @ x.cos()).sum(), rtol=1e-3, atol=1e-1)
    assert region.cache_info().recorded == 3
    del x
    region.clear()
    del region
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 16 * 2**20


def test_a_replay_writes_to_no_memory_that_others_have_by_then() -> None:
    """What cuBLAS works in is torch's to give away: Inductor's CUDA graphs let go of it, for example."""
    left, right = torch.randn(16, 65536, device="cuda"), torch.randn(65536, 16, device="cuda")
    region = CudaGraphModule(torch.fx.symbolic_trace(lambda x, y: x @ y), recorder=CudaRecorder())
    with torch.no_grad():
        for _ in range(3):
            region(left, right)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.stream(region.recorder._stream):
            others = [torch.zeros(2**20, device="cuda") for _ in range(64)]
        torch.cuda.synchronize()
        result = region(left, right)
        torch.cuda.synchronize()
        assert not any(tensor.any() for tensor in others)
        torch.testing.assert_close(result, left @ right, rtol=1e-3, atol=1e-1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_device_has_recordings_of_its_own() -> None:
    def across(x: torch.Tensor) -> torch.Tensor:
        there = x.sin().cos().to("cuda:1")
        return there.exp().sin()

    backend = capturing()
    compiled = torch.compile(across, backend=backend)
    with torch.no_grad():
        for step in range(4):
            x = batch(step)
            assert torch.equal(compiled(x), across(x))
    assert {str(region.device) for region in backend.graphs[0].plan.regions} == {"cuda:0", "cuda:1"}


class DroppingAttention(nn.Module):
    """The seed of what attention drops goes from its forward pass to its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.reshape(1, 4, -1, 16) for part in self.mix(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
        return self.out(mixed.reshape(-1, 64).relu())


def test_attention_that_drops_out_is_trained_on_between_the_regions() -> None:
    torch.manual_seed(0)
    reference = DroppingAttention().to(DEVICE)
    model, backend = copy.deepcopy(reference), capturing()
    compiled = torch.compile(model, backend=backend)
    for step in range(6):
        for module in (compiled, reference):
            torch.manual_seed(step)
            losses = [module(batch(10 * step + number)).square().mean() for number in range(2)]
            for loss in losses:
                loss.backward()
    assert_same(model, reference)
    assert hits(backend) > 2
