"""Recordings share memory: none overwrites what somebody still reads, in whatever order they were made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import assert_same_state, capturing
from torch import nn

from partita.cudagraphs import CudaGraphModule, CudaGraphsBackend, ReplayRecorder
from partita.cudagraphs.recording.pool import MemoryPool


class Result:
    """Handed out by a recording."""

    def __init__(self) -> None:
        self.is_read = True

    def give_up(self) -> None:
        self.is_read = False


def test_a_newer_result_that_somebody_reads_is_endangered_by_an_older_recording_only() -> None:
    pool = MemoryPool()
    first, second, third = (pool.next_number() for _ in range(3))
    result = Result()
    pool.hand_out(second, result)
    assert pool.endangered_by(first) is result
    assert pool.endangered_by(second) is None
    assert pool.endangered_by(third) is None
    result.is_read = False
    assert pool.endangered_by(first) is None


def test_an_older_result_is_found_behind_a_newer_one_that_was_given_back() -> None:
    pool = MemoryPool()
    numbers = [pool.next_number() for _ in range(3)]
    older, newer = Result(), Result()
    pool.hand_out(numbers[2], newer)
    pool.hand_out(numbers[1], older)
    newer.is_read = False
    assert pool.endangered_by(numbers[0]) is older


def test_the_recorder_for_the_cpu_spoils_what_an_older_replay_may_overwrite() -> None:
    recorder = ReplayRecorder()
    older = recorder.record(lambda: torch.ones(2).sin().cos())
    newer = recorder.record(lambda: (torch.ones(2) * 3, torch.ones(2, dtype=torch.bool)))
    newer.replay()
    assert newer.result[0].tolist() == [3.0, 3.0]
    older.replay()
    assert newer.result[0].isnan().all()
    newer.replay()
    assert newer.result[0].tolist() == [3.0, 3.0]
    assert not older.result.isnan().any()


class Broken(nn.Module):
    """Three regions, for two operators wait for the device. What the first one returns is read by the last
    one, past the one in the middle, which has nothing of it at a fixed address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        seen = hidden.detach()
        y = self.middle(torch.linalg.svd(seen.T @ seen)[1]).tanh()
        seen = y.detach()
        return self.last(torch.linalg.svd(seen.outer(seen))[1].sum() * y * hidden).tanh()


def pair(seed: int = 0) -> tuple[nn.Module, nn.Module, CudaGraphsBackend]:
    torch.manual_seed(seed)
    reference = Broken()
    return copy.deepcopy(reference), reference, capturing()


def test_a_region_that_is_recorded_anew_is_not_overwritten_by_those_behind_it() -> None:
    """Its results would lie where the regions behind it, recorded earlier, work."""
    model, reference, backend = pair()
    compiled = torch.compile(model.eval(), backend=backend)
    with torch.no_grad():
        for step in range(6):
            if step == 3:
                model.first.weight.data = model.first.weight.data.clone()
            x = torch.full((5, 6), float(step))
            assert torch.equal(compiled(x), reference(x)), step
    infos = backend.graphs[0].cache_info()
    assert [info.recorded for info in infos.values()] == [2, 2, 2]
    assert [info.overtaken for info in infos.values()] == [0, 0, 0]
    assert sum(info.reordered for info in infos.values()) == 1
    assert [info.hits for info in infos.values()] == [3, 3, 3]


def test_a_parameter_that_moves_in_training_costs_recordings_and_nothing_else() -> None:
    model, reference, backend = pair()
    compiled = torch.compile(model, backend=backend)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
    for step in range(8):
        if step == 4:
            model.middle.weight.data = model.middle.weight.data.clone()
        for runner, optimizer in zip((compiled, reference), optimizers, strict=True):
            runner(torch.full((5, 6), 0.1 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(model, reference)
    for graph in backend.graphs:
        assert all(info.overtaken == 0 for info in graph.cache_info().values())


@pytest.mark.parametrize("order", ["nested", "crossed", "changing"])
def test_batches_of_two_sizes_on_their_way_at_once_are_kept_apart(order: str) -> None:
    """What the larger one's forward has saved would be overwritten by the smaller one's."""
    model, reference, backend = pair()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for step in range(12):
        sizes = (7, 3) if order != "changing" or step % 2 else (3, 7)
        inputs = [torch.randn(size, 6) for size in sizes]
        grads = {}
        for runner in (compiled, reference):
            losses = [runner(x).square().sum() for x in inputs]
            for loss in losses if order == "crossed" else reversed(losses):
                loss.backward()
            module = model if runner is compiled else reference
            grads[module] = [parameter.grad.clone() for parameter in module.parameters()]
            module.zero_grad()
        assert all(torch.equal(*both) for both in zip(grads[model], grads[reference], strict=True)), step
    assert sum(info.hits for graph in backend.graphs for info in graph.cache_info().values()) > 12


def shared(function: Any, recorder: ReplayRecorder, **options: Any) -> CudaGraphModule:
    return CudaGraphModule(torch.fx.symbolic_trace(function), recorder=recorder, **options)


def test_regions_that_share_only_the_recorder_are_kept_apart_too() -> None:
    recorder = ReplayRecorder()
    older = shared(lambda x: x.sin().cos(), recorder)
    newer = shared(lambda x: x * 3, recorder, saved_outputs=[0])
    with torch.no_grad():
        for _ in range(2):
            older(torch.ones(2))
            result = newer(torch.ones(2))
        for _ in range(3):
            older(torch.ones(2))
            assert result.tolist() == [3.0, 3.0]
    assert older.cache_info().reordered == 1
    assert older.cache_info().overtaken == 0


def test_a_result_that_is_in_the_way_again_and_again_is_copied_in_the_end() -> None:
    """Recording anew each time would cost more than it saves."""
    recorder = ReplayRecorder()
    one = shared(lambda x: x.sin().cos(), recorder, saved_outputs=[0], max_recordings=2)
    other = shared(lambda x: x * 3, recorder, saved_outputs=[0], max_recordings=2)
    with torch.no_grad():
        for step in range(20):
            x = torch.full((2,), float(step))
            first, second = (one, other) if step % 2 else (other, one)
            kept, last = first(x), second(x)
            of_one, of_other = (kept, last) if first is one else (last, kept)
            assert torch.equal(of_one, x.sin().cos())
            assert torch.equal(of_other, x * 3)
            del kept, last, of_one, of_other
    for region in (one, other):
        assert region.cache_info().recorded <= 4
        assert region.cache_info().hits > 10
