"""Which memory pool each capture gets, with a pretended device: what happens around the capture is Python."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from partita.cudagraphs import CudaRecorder
from partita.errors import ExecutionError


class Stream:
    def __init__(self, *_: Any) -> None:
        self.waited = 0

    def wait_stream(self, _other: Any) -> None:
        self.waited += 1


class Graph:
    """Notes its pool, and whether the capture was ended."""

    instances: list[Graph]
    refuses_to_begin = False

    def __init__(self) -> None:
        self.pool: int | None = None
        self.ended = False
        Graph.instances.append(self)

    def register_generator_state(self, _generator: Any) -> None:
        pass

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if Graph.refuses_to_begin:
            raise RuntimeError("the stream is being captured already")
        assert capture_error_mode == "thread_local"
        self.pool = pool

    def capture_end(self) -> None:
        self.ended = True
        if self.pool == -1:
            raise RuntimeError("the capture is not valid")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    handles = count()

    @contextmanager
    def on(_stream: Any) -> Iterator[None]:
        yield

    Graph.instances, Graph.refuses_to_begin = [], False
    for name, fake in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "current_stream": Stream,
        "stream": on,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: next(handles),
        "default_generators": (None,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return CudaRecorder()


def fails() -> None:
    raise ValueError("operation not permitted when stream is capturing")


def pools() -> list[int | None]:
    return [graph.pool for graph in Graph.instances]


def test_recordings_share_a_pool_as_long_as_one_of_them_lives(recorder: CudaRecorder) -> None:
    first = recorder.record(lambda: 1)
    second = recorder.record(lambda: 2)
    del first
    third = recorder.record(lambda: 3)
    assert len(set(pools())) == 1
    assert (second.result, third.result) == (2, 3)


def test_a_pool_whose_last_recording_has_gone_is_not_used_again(recorder: CudaRecorder) -> None:
    """Torch tears it down; to capture into it then is an internal error of torch's."""
    recording = recorder.record(lambda: 1)
    del recording
    gc.collect()
    recorder.record(lambda: 2)
    assert len(set(pools())) == 2


def test_a_failed_capture_ends_and_leaves_its_pool_behind(recorder: CudaRecorder) -> None:
    kept = recorder.record(lambda: 1)
    with pytest.raises(ExecutionError, match="can't be captured: operation not permitted when stream is cap"):
        recorder.record(fails)
    assert Graph.instances[-1].ended
    after = recorder.record(lambda: 2)
    again = recorder.record(lambda: 3)
    first, failed, new, same = pools()
    assert first == failed != new == same
    assert [recording.result for recording in (kept, after, again)] == [1, 2, 3]


def test_a_capture_that_can_not_begin_is_an_error_of_ours_too(recorder: CudaRecorder) -> None:
    Graph.refuses_to_begin = True
    with pytest.raises(ExecutionError, match="the stream is being captured already; it runs uncaptured"):
        recorder.record(lambda: 1)
    assert not Graph.instances[0].ended


def test_an_interrupt_ends_the_capture_and_stays_what_it_is(recorder: CudaRecorder) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder.record(interrupted)
    assert Graph.instances[0].ended
