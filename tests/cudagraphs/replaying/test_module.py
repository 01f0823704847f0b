"""Replaying one region: equal to running it, however often and with whatever it is given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from partita.cudagraphs import CudaGraphModule, CudaGraphsBackend, ReplayRecorder, SavingModel
from partita.errors import ExecutionError


class Counting(ReplayRecorder):
    """Counts the buffers that inputs are copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = 0

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        self.buffers += 1
        return super().buffer(like)


def region(function: Callable[..., Any] | nn.Module, **options: Any) -> CudaGraphModule:
    return CudaGraphModule(
        symbolic_trace(function), recorder=options.pop("recorder", ReplayRecorder()), **options
    )


def runs(
    function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], times: int = 4, **options: Any
) -> CudaGraphModule:
    """Run region and function side by side; outputs, inputs and random state have to agree after each run."""
    recorded = region(function, **options)
    for time in range(times):
        torch.manual_seed(time)
        ours = make()
        torch.manual_seed(time)
        theirs = make()
        torch.manual_seed(100 + time)
        actual = recorded(*ours)
        after = torch.random.get_rng_state()
        torch.manual_seed(100 + time)
        expected = function(*theirs)
        assert torch.equal(after, torch.random.get_rng_state())
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert recorded.cache_info().hits >= times - 2
    return recorded


def test_replays_return_what_the_graph_returns() -> None:
    runs(lambda x, y: (x.sin() @ y, x.sum()), lambda: (torch.randn(3, 3), torch.randn(3, 3)))


def test_random_numbers_go_on_as_without_recording() -> None:
    runs(lambda x: nn.functional.dropout(x, 0.5, True) + torch.rand_like(x), lambda: (torch.randn(8),))


def test_written_inputs_are_copied_back() -> None:
    def function(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.view(-1).add_(x.sum())
        return total * 2

    assert runs(function, lambda: (torch.randn(3), torch.randn(1, 1))).mutated_inputs == {1}


def test_outputs_survive_the_next_replay() -> None:
    recorded = region(lambda x: x + 1)
    results = [recorded(torch.full((2,), float(number))) for number in range(5)]
    assert [result[0].item() for result in results] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_transient_output_is_good_until_the_next_replay_only() -> None:
    recorded = region(lambda x: x + 1, transient_outputs=[0])
    for _ in range(3):
        last = recorded(torch.zeros(2))
    assert last.tolist() == [1.0, 1.0]
    recorded(torch.ones(2))
    assert last.tolist() == [2.0, 2.0]


def test_an_output_that_is_an_input_is_the_callers_tensor() -> None:
    recorded = region(lambda x, y: (x, y.sin()))
    for _ in range(3):
        x = torch.randn(2)
        assert recorded(x, x + 1)[0] is x


def test_a_view_of_an_input_is_a_view_of_the_callers_tensor() -> None:
    recorded = region(lambda x: (x[:, 1:].t(), x.sin()))
    for _ in range(3):
        base = torch.randn(5, 4)
        view, _ = recorded(base[1:4])
        assert torch.equal(view, base[1:4, 1:].t())
        assert view.stride() == base[1:4, 1:].t().stride()
        view.zero_()
        assert base[1:4, 1:].abs().sum() == 0


def test_outputs_that_share_memory_go_on_sharing_it() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y, y.view(-1)[1:], y.t()

    recorded = region(function)
    for _ in range(3):
        whole, part, turned = recorded(torch.randn(2, 3))
        whole.fill_(7.0)
        assert part.unique().tolist() == turned.unique().tolist() == [7.0]
        assert turned.stride() == (1, 3)


def test_outputs_that_are_lazily_conjugate_or_negative_stay_so() -> None:
    """Bits of the tensor say so, and not its memory: a view of a copy has to have them too."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.conj(), y.conj().imag, x.conj(), x.conj().imag

    recorded = region(function)
    for _ in range(3):
        x = torch.randn(3, dtype=torch.complex64)
        for actual, expected in zip(recorded(x), function(x), strict=True):
            assert torch.equal(actual, expected)
            assert (actual.is_conj(), actual.is_neg()) == (expected.is_conj(), expected.is_neg())
    alone = region(lambda x: (x + 1).conj())
    assert all(alone(torch.randn(3, dtype=torch.complex64)).is_conj() for _ in range(4))
    in_place = region(function, saved_outputs=[0, 1, 2])
    with torch.no_grad():
        for _ in range(3):
            assert all(torch.equal(*both) for both in zip(in_place(x), function(x), strict=True))


def test_expanded_and_sliced_inputs_are_copied_right() -> None:
    runs(
        lambda x, y: (x * 2, y.cos()),
        lambda: (torch.randn(3, 1).expand(3, 4), torch.randn(6, 6)[::2, 1:4]),
    )


def test_a_written_input_that_shares_memory_with_another_runs_uncaptured() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    def shared() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.randn(4)
        return base, base.view(2, 2)

    recorded = region(function)
    for time in range(4):
        torch.manual_seed(time)
        x, y = shared()
        expected = (x + 1).view(2, 2) * 2
        assert torch.equal(recorded(x, y), expected)
    assert recorded.cache_info().recorded == 0
    assert recorded.cache_info().uncaptured == 4


def test_an_input_on_memory_that_the_graph_holds_runs_uncaptured() -> None:
    holder = nn.Module()
    holder.register_buffer("total", torch.zeros(4))
    graph = torch.fx.Graph()
    x, total = graph.placeholder("x"), graph.get_attr("total")
    graph.call_method("add_", (total, 1))
    graph.output(graph.call_method("mul", (x, 2)))
    recorded = CudaGraphModule(torch.fx.GraphModule(holder, graph), recorder=ReplayRecorder())
    for number in range(1, 5):
        total = recorded.gm.get_buffer("total")
        total.fill_(number - 1)
        assert recorded(total).tolist() == [2.0 * number] * 4
        assert recorded(total[1:]).tolist() == [2.0 * number + 2] * 3
    assert recorded.cache_info().recorded == 0


def test_inputs_on_overlapping_memory_from_elsewhere_run_uncaptured() -> None:
    """Each has a storage of its own, and they begin at different addresses."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    array = np.zeros(8, np.float32)
    recorded = region(function)
    for number in range(4):
        array[:] = number
        actual = recorded(torch.from_numpy(array[:5]), torch.from_numpy(array[2:]))
        assert actual.tolist() == (array[2:] * 2).tolist()
    assert recorded.cache_info().recorded == 0


def test_numbers_are_part_of_the_kind_of_call() -> None:
    recorded = region(lambda x, n: x * n)
    for number in (2, 2, 2, 3, 3, 3, 2.0, 2.0, True, True):
        assert torch.equal(
            recorded(torch.ones(2, dtype=torch.int64), number), torch.ones(2, dtype=torch.int64) * number
        )
    assert recorded.cache_info().recorded == 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x)))


def test_parameters_and_buffers_are_not_copied() -> None:
    recorder = Counting()
    recorded = region(Net(), recorder=recorder)
    with torch.no_grad():
        for _ in range(3):
            recorded(torch.randn(3, 4))
    assert recorder.recorded == recorder.buffers == 1  # for the one input


def test_running_statistics_are_updated_once_a_call_and_modes_are_followed() -> None:
    torch.manual_seed(0)
    net = Net()
    recorded = region(net)
    reference = Net()
    reference.load_state_dict(net.state_dict())
    with torch.no_grad():
        for time in range(9):
            recorded.train(time < 4 or time > 6)
            reference.train(time < 4 or time > 6)
            x = torch.randn(3, 4)
            torch.manual_seed(time)
            actual = recorded(x)
            torch.manual_seed(time)
            assert torch.equal(actual, reference(x))
    for name, value in reference.state_dict().items():
        assert torch.equal(recorded.gm.state_dict()[name], value), name
    assert recorded.cache_info().recorded == 2


def test_a_parameter_that_has_moved_is_found_where_it_is() -> None:
    net = nn.Linear(2, 2, bias=False)
    recorded = region(nn.Sequential(net))
    with torch.no_grad():
        for number in range(4):
            recorded(torch.ones(2))
            net.weight.data = torch.full((2, 2), float(number))
            assert recorded(torch.ones(2)).tolist() == [2.0 * number] * 2
    info = recorded.cache_info()
    assert info.recorded == 4
    assert info.size == 4  # one on each memory: equal layers may take turns


def test_equal_layers_that_take_turns_have_a_recording_each() -> None:
    """Where Dynamo compiles layer by layer, all of them run one graph, each with its own parameters."""
    layers = [torch.full((2,), float(number)) for number in range(3)]
    recorded = region(lambda x, weight: x * weight, static_inputs=[1])
    for step in range(5):
        for number, weight in enumerate(layers):
            assert recorded(torch.full((2,), float(step)), weight).tolist() == [step * float(number)] * 2
    info = recorded.cache_info()
    assert (info.size, info.recorded, info.evicted, info.hits) == (3, 3, 0, 11)


def test_an_input_declared_static_is_used_where_it_lies() -> None:
    recorder = Counting()
    recorded = region(lambda x, w: x @ w, recorder=recorder, static_inputs=[1])
    weight = torch.randn(2, 2)
    for _ in range(4):
        weight += 1
        x = torch.randn(2, 2)
        assert torch.equal(recorded(x, weight), x @ weight)
    assert recorder.buffers == 1
    moved = torch.randn(2, 2)
    assert torch.equal(recorded(x, moved), x @ moved)


def test_kinds_of_calls_are_bounded_and_the_oldest_goes() -> None:
    recorded = region(lambda x: x.sin(), max_recordings=2)
    for size in (1, 1, 1, 2, 2, 2, 3, 3, 3, 3):
        x = torch.randn(size)
        assert torch.equal(recorded(x), x.sin())
    info = recorded.cache_info()
    assert (info.size, info.max_size, info.recorded, info.evicted) == (2, 2, 3, 1)
    assert info.hits == 4


def test_what_was_not_used_for_longest_goes_and_not_what_was_recorded_first() -> None:
    recorded = region(lambda x: x.sin(), max_recordings=2)
    for size in (1, 1, 2, 2, 1, 3, 3, 1):
        x = torch.randn(size)
        assert torch.equal(recorded(x), x.sin())
    info = recorded.cache_info()
    assert (info.recorded, info.evicted) == (3, 1)
    assert info.hits == 2  # size 1, before and after the recording of size 3 that has pushed out size 2


def test_a_region_that_never_replays_gives_up_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    recorded = region(lambda x: x.sin(), max_recordings=2, name="region_7")
    with caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        for size in range(1, 9):
            for _ in range(2):
                x = torch.randn(size)
                assert torch.equal(recorded(x), x.sin())
    assert (
        "region_7 runs uncaptured from now on: its last 2 recordings were not used a second time"
        in caplog.text
    )
    assert len(caplog.records) == 1
    assert recorded.cache_info().recorded == 2
    recorded.clear()
    assert not recorded.cache_info().gave_up


def test_what_can_not_be_recorded_runs_uncaptured_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    recorded = region(lambda x: x * x.sum().item())
    with caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        for _ in range(3):
            x = torch.randn(3)
            assert torch.equal(recorded(x), x * x.sum().item())
    assert "data_dependent_output" in caplog.text


def test_gradients_are_refused_with_a_way_out() -> None:
    recorded = region(lambda x: x.sin())
    with pytest.raises(ExecutionError, match=r"call it under torch\.no_grad\(\)"):
        recorded(torch.ones(2, requires_grad=True))


def test_grad_mode_is_switched_inside_of_a_recording() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    first = graph.call_method("sin", (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output((first, graph.call_method("cos", (first,))))
    recorded = CudaGraphModule(torch.fx.GraphModule(nn.Module(), graph), recorder=ReplayRecorder())
    with torch.no_grad():
        for number in range(4):
            x = torch.full((2,), float(number))
            first, second = recorded(x)
            assert torch.equal(first, x.sin())
            assert torch.equal(second, x.sin().cos())
            assert not torch.is_grad_enabled()
    assert recorded.cache_info().hits == 2


def test_a_parameter_that_the_graph_writes_is_written_where_it_lies() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale.mul_(2.0)
            return x * self.scale

    counter = Counter()
    recorded = region(counter)
    with torch.no_grad():
        for number in range(1, 5):
            assert recorded(torch.ones(2)).tolist() == [2.0**number] * 2
            assert recorded.gm.get_parameter("scale").tolist() == [2.0**number] * 2


def test_a_write_by_a_mask_is_no_region_and_keeps_its_place_between_two() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        y[y > 0.9] = 0.0
        return y.exp().sin().cos()

    used = CudaGraphsBackend(recorder="replay", saving=SavingModel(launch_s=1.0, replay_s=0.0))
    compiled = torch.compile(function, backend=used)
    with torch.no_grad():
        for number in range(4):
            x = torch.randn(8, generator=torch.Generator().manual_seed(number))
            assert torch.equal(compiled(x), function(x))
    (graph,) = used.graphs
    assert [region.recorder is not None for region in graph.regions] == [True, True]
    assert all(info.hits == 2 for info in graph.cache_info().values())


def test_a_region_that_switches_gradients_on_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(2, requires_grad=True)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    gm = symbolic_trace(function)
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(node):
        gm.graph.call_function(torch._C._set_grad_enabled, (True,))
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    gm.recompile()
    recorded = CudaGraphModule(gm, recorder=ReplayRecorder())
    with torch.no_grad(), caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        results = [recorded(torch.ones(2), weight) for _ in range(3)]
    assert all(result.requires_grad for result in results)
    assert "it switches gradients on" in caplog.text


def test_no_room_for_a_recording_is_refused() -> None:
    with pytest.raises(ExecutionError, match="max_recordings is 0"):
        region(lambda x: x, max_recordings=0)


def test_without_a_recorder_the_graph_runs_as_it_is() -> None:
    recorded = CudaGraphModule(symbolic_trace(lambda x: x + 1))
    assert recorded(torch.zeros(1)).item() == 1.0
    assert recorded.cache_info().uncaptured == 1
