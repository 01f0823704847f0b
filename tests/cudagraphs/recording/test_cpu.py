"""The recorder for the CPU shows the mistakes that it is there to show."""

from __future__ import annotations

import pytest
import torch

from partita.cudagraphs import CudaRecorder, GraphRecorder, ReplayRecorder
from partita.errors import ExecutionError

GIVEN = torch.ones(2, 3)


def test_it_is_a_recorder() -> None:
    assert isinstance(ReplayRecorder(), GraphRecorder)


def test_recording_runs_nothing_that_can_be_seen() -> None:
    total, state = torch.zeros(2), torch.random.get_rng_state()
    ReplayRecorder().record(lambda: (total.add_(1), torch.rand(2)))
    assert total.tolist() == [0.0, 0.0]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_output_that_was_not_replayed_is_nan() -> None:
    recording = ReplayRecorder().record(lambda: torch.ones(2) + 1)
    assert recording.result.isnan().all()
    recording.replay()
    assert recording.result.tolist() == [2.0, 2.0]


def test_an_input_that_was_not_copied_is_nan() -> None:
    recorder = ReplayRecorder()
    buffer = recorder.buffer(torch.zeros(2))
    buffer.copy_(torch.ones(2))
    recording = recorder.record(lambda: buffer * 2)
    recording.replay()
    recording.finish()
    assert recording.result.tolist() == [2.0, 2.0]
    recording.replay()
    assert recording.result.isnan().all()


def test_what_is_no_output_is_spoilt_after_a_replay() -> None:
    kept = []

    def run() -> torch.Tensor:
        kept.append(torch.ones(2) * 3)
        return kept[0] + 1

    recording = ReplayRecorder().record(run)
    recording.replay()
    assert recording.result.tolist() == [4.0, 4.0]
    assert kept[0].isnan().all()


def test_a_replay_reads_the_memory_of_the_recording() -> None:
    """On a GPU a parameter that has moved leaves its old address behind; here too."""
    weight = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        recording = ReplayRecorder().record(lambda: weight * 2)
    weight.data = torch.full((2,), 5.0)
    recording.replay()
    assert recording.result.tolist() == [2.0, 2.0]


def test_python_does_not_run_again() -> None:
    calls = []
    recording = ReplayRecorder().record(lambda: calls.append(1) or torch.ones(1) * len(calls))
    for _ in range(3):
        recording.replay()
    assert calls == [1]
    assert recording.result.item() == 1.0


@pytest.mark.parametrize(
    "run", [lambda: torch.ones(1).item(), lambda: torch.ones(2).nonzero(), lambda: GIVEN.t_()]
)
def test_what_can_not_be_captured_is_refused(run: object) -> None:
    with pytest.raises(ExecutionError, match="can't be recorded"):
        ReplayRecorder().record(run)


def test_a_tensor_may_be_turned_in_place() -> None:
    recording = ReplayRecorder().record(lambda: (torch.ones(2, 3) + 1).t_().cumsum(1))
    for _ in range(2):
        recording.replay()
        assert recording.result.tolist() == [[2.0, 4.0]] * 3


def test_integers_and_booleans_are_spoilt_too() -> None:
    recording = ReplayRecorder().record(
        lambda: (
            torch.zeros(1, dtype=torch.int32) + 1,
            torch.zeros(1, dtype=torch.uint8) + 1,
            torch.zeros(1) > 1,
        )
    )
    assert [value.item() for value in recording.result] == [-1, 255, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_recorder_for_a_gpu_says_that_there_is_none() -> None:
    with pytest.raises(ExecutionError, match="there is none: use ReplayRecorder"):
        CudaRecorder()
