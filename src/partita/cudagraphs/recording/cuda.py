"""Recording on a GPU: CUDA graphs, all of a model and a slot in one memory pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from partita._torch.operators.matmul_workspaces import matmul_workspaces_of_their_own
from partita.cudagraphs.facts.devices import tensors_in
from partita.cudagraphs.recording.pool import MemoryPools
from partita.errors import ExecutionError

__all__ = ["CudaRecorder"]

_T = TypeVar("_T")


class CudaRecorder:
    """A `GraphRecorder` for one CUDA device.

    All its recordings of one slot share one memory pool: what a region uses in between is free for the
    others, and what it returns is kept as long as the recording. A capture that failed leaves its pool behind
    as it may be; and one whose last recording has gone is torn down by torch. In both cases the next
    recording gets a new one.

    Args:
        device: by default the current one.

    Raises:
        ExecutionError: there is no CUDA device.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise ExecutionError(
                "CudaRecorder needs a CUDA device and there is none: use ReplayRecorder() to try regions "
                "on the CPU"
            )
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.pools = MemoryPools()
        self._stream = torch.cuda.Stream(self.device)
        self._memory: dict[int, Any] = {}
        self._living: defaultdict[int, WeakSet[CudaRecording]] = defaultdict(WeakSet)

    def __reduce__(self) -> tuple[type[CudaRecorder], tuple[torch.device]]:
        """A copy, and what was pickled, has a stream and a memory pool of its own, on the same device."""
        return type(self), (self.device,)

    def warm_up(self, run: Callable[[], _T]) -> _T:
        """Run on a side stream; the current stream waits for it.

        ::

            current   ───┐             ┌── goes on with the results
            side         └── run ──────┘
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        for tensor in tensors_in(result):
            if tensor.is_cuda:
                tensor.record_stream(current)
        return result

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory, outside of the pool."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def record(self, run: Callable[[], Any], slot: int = 0) -> CudaRecording:
        """Capture ``run``, with the device's default generator registered, so that random numbers go on.

        Raises:
            ExecutionError: an operator can't be captured; the message has CUDA's own words.
        """
        if slot not in self._memory or not self._living[slot]:
            self._memory[slot] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(torch.cuda.default_generators[self.device.index])
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream), matmul_workspaces_of_their_own():
                result = _captured(graph, self._memory[slot], run)
        except Exception as error:
            del self._memory[slot]
            raise ExecutionError(
                f"the region can't be captured: {error}; it runs uncaptured. Leave the operator out of "
                f"the region"
            ) from error
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        recording = CudaRecording(graph, result)
        self._living[slot].add(recording)
        return recording


def _captured(graph: torch.cuda.CUDAGraph, memory: Any, run: Callable[[], _T]) -> _T:
    """Capture ``run``, and return its result. The stream captures no more afterwards, whatever happens."""
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        result = run()
    except BaseException:
        with suppress(RuntimeError):  # it says once more that the capture is not valid
            graph.capture_end()
        raise
    graph.capture_end()
    return result


class CudaRecording:
    """A `Recording` that is a CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Any) -> None:
        self.result = result
        self._graph = graph

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def finish(self) -> None:
        """Do nothing: buffers may keep their values."""
