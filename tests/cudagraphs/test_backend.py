"""``torch.compile`` with the backend: training and inference equal to the model as it is, bit for bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import AllWorthIt, CountingRecorder, Net, assert_same_state, batch, capturing
from tests.own_functions import OwnFunctions
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention.flex_attention import flex_attention

from partita.cudagraphs import CudaGraphsBackend, ReplayRecorder, backend, cudagraphs
from partita.errors import ArgumentError, NotCompiled


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_training_is_that_of_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    used = capturing()
    for module, runner in ((model, torch.compile(model, backend=used)), (reference, reference)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(5):
            torch.manual_seed(step)
            runner(*batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, reference)
    kinds = {graph.kind: graph for graph in used.graphs}
    assert kinds.keys() == {"forward", "backward"}
    for graph in used.graphs:
        assert graph.regions
        assert all(info.hits == 3 and info.recorded == 1 for info in graph.cache_info().values()), (
            graph.cache_info()
        )
    refused = " ".join(map(str, kinds["forward"].plan.refusals))
    assert "capturing.py" in refused
    assert "torch.linalg.svd(hidden.detach())" in refused


def test_functions_of_the_users_own_keep_their_backward_passes() -> None:
    torch.manual_seed(0)
    reference = OwnFunctions(8)
    model = copy.deepcopy(reference)
    used = capturing()
    for module, runner in ((model, torch.compile(model, backend=used)), (reference, reference)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            runner(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, reference)
    assert all(info.hits for graph in used.graphs for info in graph.cache_info().values())


def test_gradients_accumulate_over_forwards_that_come_before_their_backwards() -> None:
    """A pipeline has several microbatches under way: what one saved must outlive the replay of the next."""
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, backend=capturing())
    for runner in (compiled, reference):
        torch.manual_seed(1)
        for _ in range(3):
            losses = [runner(*batch(step)).sum() for step in range(3)]
            for loss in losses:
                loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert_same_state(model, reference)


def test_inference_follows_weights_that_move_and_change() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    used = capturing()
    compiled = torch.compile(model, backend=used)
    with torch.no_grad():
        for step in range(9):
            if step == 3:
                model.first.weight.mul_(2.0)
            if step == 6:
                model.last.weight.data = torch.randn(2, 6)
            assert torch.equal(compiled(*batch(step)), model(*batch(step)))
    assert {graph.kind for graph in used.graphs} == {"inference"}
    assert sum(info.hits for info in used.graphs[0].cache_info().values()) > 0


def test_no_parameter_is_copied_in_forward_or_backward() -> None:
    recorder = CountingRecorder()
    model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 5))
    compiled = torch.compile(model, backend=capturing(recorder=lambda _device: recorder))
    for _ in range(3):
        compiled(torch.ones(2, 3)).sum().backward()
    weights = {(7, 3), (3, 7), (5, 7), (7, 5), (7,), (5,)}
    assert recorder.recorded == 2
    assert (2, 3) in recorder.copied
    assert not weights.intersection(recorder.copied)


def test_shapes_that_change_are_recorded_each_and_stay_right() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    used = capturing(max_recordings=2)
    compiled = torch.compile(model, backend=used, dynamic=True)
    with torch.no_grad():
        for rows in (3, 4, 3, 4, 3, 4, 3, 4, 5, 5, 5):
            torch.testing.assert_close(
                compiled(*batch(rows, rows)), model(*batch(rows, rows)), rtol=0, atol=0
            )
    infos = [info for graph in used.graphs for info in graph.cache_info().values()]
    assert all(info.size <= 2 for info in infos)
    assert any(info.hits >= 2 and info.recorded == 3 for info in infos)


def test_inputs_that_the_model_writes_are_written() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sin())
        return total.mean() + torch.rand(())

    compiled = torch.compile(step, backend=capturing())
    ours, theirs = torch.zeros(3), torch.zeros(3)
    with torch.no_grad():
        for seed in range(4):
            x = torch.full((3,), float(seed))
            torch.manual_seed(seed)
            actual = compiled(x, ours)
            torch.manual_seed(seed)
            assert torch.equal(actual, step(x, theirs))
            assert torch.equal(ours, theirs)


def test_results_stay_as_they_were_returned() -> None:
    compiled = torch.compile(lambda x: (x.sin(), x.cos()), backend=capturing())
    with torch.no_grad():
        results = [compiled(torch.full((2,), float(number))) for number in range(4)]
    for number, (sine, cosine) in enumerate(results):
        assert torch.equal(sine, torch.full((2,), float(number)).sin())
        assert torch.equal(cosine, torch.full((2,), float(number)).cos())


def test_every_piece_goes_through_the_inner_compiler() -> None:
    seen = []

    def inner(gm: torch.fx.GraphModule, examples: Any) -> Any:
        seen.append((len(gm.graph.find_nodes(op="placeholder")), len(examples)))
        return gm

    model = Net().eval()
    compiled = torch.compile(model, backend=capturing(inner=inner))
    with torch.no_grad():
        for step in range(3):
            assert torch.equal(compiled(*batch(step)), model(*batch(step)))
    assert len(seen) > 1
    assert all(inputs == examples for inputs, examples in seen)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.dear), True])
def test_inductor_compiles_the_pieces_and_random_numbers_stay(dynamic: bool) -> None:
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    used = capturing(inner="inductor")
    compiled = torch.compile(model, backend=used, dynamic=dynamic)
    for step in range(4):
        results = []
        for runner in (compiled, reference):
            torch.manual_seed(step)
            results.append(runner(*batch(step)))
            results[-1].square().mean().backward()
        # fused kernels round differently; another dropout mask would differ in the first digit
        torch.testing.assert_close(*results)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)
    infos = [info for graph in used.graphs for info in graph.cache_info().values()]
    assert len(infos) == 3
    assert all(info.hits == 2 for info in infos)


def test_eager_is_the_graph_as_it_is() -> None:
    assert capturing(inner="aot_eager").options.compiler is capturing().options.compiler is None


@pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="partita_cudagraphs"),
    reason="names are known after installation only",
)
def test_the_backend_is_known_by_name() -> None:
    assert "partita_cudagraphs" in torch.compiler.list_backends()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    replays = []

    class Counting(ReplayRecorder):
        def record(self, run: Any, slot: int = 0) -> Any:
            replays.append(self)
            return super().record(run, slot)

    recorder = Counting()
    options = {"recorder": lambda _device: recorder, "saving": AllWorthIt(), "inner": "aot_eager"}
    compiled = torch.compile(model, backend="partita_cudagraphs", options=options)
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
            assert torch.equal(compiled(x), model(x))
    assert recorder.replayed == 3
    assert len(replays) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_backend_by_name_and_without_options_runs_the_model_as_it_is() -> None:
    model = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(model, backend=cudagraphs)(x), model(x))


@torch.library.custom_op("partita_tests::triple", mutates_args=("x",))
def triple(x: torch.Tensor) -> None:
    x.mul_(3)


def test_a_custom_operator_that_writes_is_captured_only_when_allowed() -> None:
    """AOTAutograd wraps it in an operator of its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        triple(y)
        return y.cos().sin()

    used = capturing()
    compiled = torch.compile(function, backend=used)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(compiled(x), function(x))
    (graph,) = used.graphs
    assert "it is the custom operator partita_tests::triple" in str(graph.plan)
    assert all(info.hits == 2 for info in graph.cache_info().values())


def test_what_the_recorder_can_not_record_runs_uncaptured_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    used = capturing()
    compiled = torch.compile(_flex, backend=used)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        for _ in range(3):
            q = torch.randn(1, 1, 128, 16)
            expected = nn.functional.scaled_dot_product_attention(q, q, q).sin()
            torch.testing.assert_close(compiled(q), expected)
    assert "the region can't be recorded" in caplog.text


def _flex(q: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, q, q).sin()


def test_a_region_that_saves_nothing_is_left_alone() -> None:
    used = CudaGraphsBackend(recorder="replay")
    with torch.no_grad():
        torch.compile(lambda x: x.sin(), backend=used)(torch.ones(2))
    assert not used.graphs[0].regions
    assert used.graphs[0].plan.too_small[0].launches == 1
    assert "not worth it: 1 nodes, 1 launches, 2 copies" in str(used.graphs[0].plan)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_runs_uncaptured_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backend._say_once.cache_clear()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        for function in (torch.sin, torch.cos):
            assert torch.compile(lambda x, f=function: f(x), backend=cudagraphs)(torch.zeros(1)).item() in (
                0.0,
                1.0,
            )
    assert len(caplog.records) == 1
    assert "there is no CUDA device, so nothing is captured" in caplog.text
    assert '{"recorder": "replay"}' in caplog.text


def test_options_come_through_torch_compile() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=cudagraphs, options={"recorder": "replay"})
    with torch.no_grad():
        assert compiled(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recoder": "replay"}, "unknown option 'recoder': partita_cudagraphs takes recorder, allow"),
        ({"recorder": "gpu"}, "recorder is 'cuda', 'replay' or a function"),
        ({"inner": "triton"}, "inner is 'aot_eager', 'inductor' or a function"),
        ({"max_recordings": 0}, "max_recordings is 0"),
    ],
)
def test_an_option_that_can_not_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CudaGraphsBackend(**options)


def test_a_mode_of_inductors_is_refused() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="partita_cudagraphs", mode="reduce-overhead")
    with pytest.raises(BackendCompilerFailed, match="mode is 'reduce-overhead', and modes are Inductor's"):
        compiled(torch.zeros(1))


def test_a_graph_with_a_margin_loss_runs_as_it_is() -> None:
    """A trace computes another number: 2.05 for the example that torch documents with 0.85."""
    loss, scores = nn.MultiLabelMarginLoss(), torch.tensor([[0.1, 0.2, 0.4, 0.8]])
    target = torch.tensor([[3, 0, -1, 1]])
    used = capturing()
    run = torch.compile(lambda scores: loss(scores.sin().asin(), target), backend=used)
    with pytest.warns(NotCompiled, match="a graph runs uncompiled.*multilabel_margin_loss"):
        result = run(scores)
    assert torch.equal(result, loss(scores.sin().asin(), target))
    assert not used.graphs


def test_elementwise_results_of_operands_in_different_orders_are_laid_out_as_in_eager() -> None:
    """Torch's fake tensors take the order of the second, so `contiguous` was left out of the trace."""

    def divided(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.floor_divide(x.mT, by).contiguous()

    x, by = torch.arange(24.0).reshape(2, 4, 3), torch.full((2, 3, 4), 5.0)
    result = torch.compile(divided, backend=CudaGraphsBackend(recorder="replay"))(x, by)
    assert result.equal(divided(x, by))
    assert result.stride() == divided(x, by).stride()
