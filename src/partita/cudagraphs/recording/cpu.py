"""Recording without a GPU: operator calls, replayed on the addresses of the recording, and strict about it.

Mistakes that a GPU would forgive by chance show at once:

- an input that was not copied to its buffer: the buffer holds NaN (-1 for integers) after each replay;
- an output that was read after the next replay, or not copied: it is NaN until the replay has run, and what
  is no output of the region is NaN afterwards;
- an output that is read after the replay of an older recording of its slot: in the memory that they share it
  may lie where that one works (see `partita.cudagraphs.recording.pool`), and so it is NaN from then on;
- a parameter that has moved: the replay reads the memory of the recording, not that of the module;
- a value that the host reads, a shape that depends on data: recording fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from partita._torch.operators.call_recording import RecordedCall, record_calls
from partita._torch.tensors.storage import WeakStorage, storage_key
from partita.cudagraphs.facts.devices import tensors_in
from partita.cudagraphs.recording.pool import MemoryPools
from partita.errors import ExecutionError

__all__ = ["ReplayRecorder"]

_T = TypeVar("_T")


class ReplayRecorder:
    """A `GraphRecorder` for tensors on the CPU. For tests and for trying things out: it saves no time.

    Attributes:
        pools: what is in use of the memory that the recordings of a slot share.
        recorded: how many recordings it has made.
        replayed: how many replays they have run.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        self.pools = MemoryPools()
        self.recorded = 0
        self.replayed = 0
        self._buffers: list[torch.Tensor] = []
        self._returned: list[tuple[int, int, WeakStorage, int]] = []

    def __reduce__(self) -> tuple[type[ReplayRecorder], tuple[()]]:
        """A copy, and what was pickled, begins anew."""
        return type(self), ()

    def warm_up(self, run: Callable[[], _T]) -> _T:
        """Call ``run``; the CPU needs no warm-up."""
        return run()

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory full of NaN."""
        buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        poison(buffer)
        self._buffers.append(buffer)
        return buffer

    def record(self, run: Callable[[], Any], slot: int = 0) -> CallRecording:
        """Record the operator calls of ``run``; what it writes is put back.

        Raises:
            ExecutionError: ``run`` reads a value, a shape depends on data, or something else goes wrong in
                it, as on a GPU.
        """
        try:
            result, calls = record_calls(run)
        except ExecutionError:
            raise
        except Exception as error:
            raise ExecutionError(f"the region can't be recorded: {error}; it runs uncaptured") from error
        finally:
            buffers, self._buffers = self._buffers, []
        self.recorded += 1
        return CallRecording(self, result, calls, buffers, slot)

    def note_outputs(self, outputs: Sequence[torch.Tensor], slot: int) -> None:
        """Note that the newest recording, made in this slot, returns ``outputs``."""
        self._returned = [item for item in self._returned if item[2].bytes() is not None]
        for tensor in outputs:
            self._returned.append((slot, self.recorded, WeakStorage(tensor), _filling(tensor.dtype)))

    def replay_begins(self, number: int, slot: int) -> None:
        """Spoil what recordings of the slot that are newer than ``number`` (from 1) have returned: its replay
        may overwrite it.
        """
        self.replayed += 1
        for other, newer, memory, filling in self._returned:
            content = memory.bytes() if other == slot and newer > number else None
            if content is not None:
                content.fill_(filling)


class CallRecording:
    """A `Recording` made of operator calls."""

    def __init__(
        self,
        recorder: ReplayRecorder,
        result: Any,
        calls: Sequence[RecordedCall],
        buffers: Sequence[torch.Tensor],
        slot: int,
    ) -> None:
        self.result = result
        self._slot = slot
        self._recorder = recorder
        self._number = recorder.recorded
        self._calls = calls
        self._buffers = buffers
        returned = {storage_key(tensor) for tensor in tensors_in(result)}
        allocated = [
            tensor for call in calls for tensor, fresh in zip(call.results, call.fresh, strict=True) if fresh
        ]
        self._outputs = [tensor for tensor in allocated if storage_key(tensor) in returned]
        self._inner = [tensor for tensor in allocated if storage_key(tensor) not in returned]
        for tensor in allocated:
            poison(tensor)
        recorder.note_outputs(self._outputs, slot)

    def replay(self) -> None:
        """Run the calls in order on their addresses."""
        self._recorder.replay_begins(self._number, self._slot)
        for tensor in self._outputs:
            poison(tensor)
        for call in self._calls:
            call.run()
        for tensor in self._inner:
            poison(tensor)

    def finish(self) -> None:
        """Spoil the input buffers."""
        for buffer in self._buffers:
            poison(buffer)


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or -1 (True for booleans) where the dtype has none."""
    if not tensor.numel():
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    tensor.as_strided((span,), (1,)).view(torch.uint8).fill_(_filling(tensor.dtype))


def _filling(dtype: torch.dtype) -> int:
    """The byte that memory is filled with: all bits set are a NaN, -1, and the largest number."""
    return 1 if dtype is torch.bool else 0xFF
