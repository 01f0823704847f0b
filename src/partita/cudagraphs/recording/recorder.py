"""The seam to the device: what records a region once and replays it.

::

    warm_up(run)          the first call of a kind: runs for real, its results count
    record(run)           the second: notes what would run, on which addresses, and runs nothing
    recording.replay()    from then on: runs what was noted, on the same addresses

Two implementations ship: `CudaRecorder` (a CUDA graph) and `ReplayRecorder` (recorded operator calls on
the CPU, strict about addresses), so that everything above this seam is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from partita.cudagraphs.recording.pool import MemoryPools

__all__ = ["GraphRecorder", "Recording"]

_T = TypeVar("_T")


class Recording(Protocol):
    """One recorded run."""

    @property
    def result(self) -> Any:
        """What the run returned; its tensors are overwritten by each replay, and undefined before the
        first.
        """
        ...

    def replay(self) -> None:
        """Run what was recorded."""
        ...

    def finish(self) -> None:
        """Let go of the input buffers: the written inputs have been copied back."""
        ...


@runtime_checkable
class GraphRecorder(Protocol):
    """Records for one device. All recordings of one recorder in the same slot may share memory, so two of
    them never run at once.
    """

    @property
    def device_type(self) -> str:
        """The type of device of the tensors that it can record."""
        ...

    @property
    def pools(self) -> MemoryPools:
        """What its recordings have handed out of the memory that those of one slot share."""
        ...

    def warm_up(self, run: Callable[[], _T]) -> _T:
        """Run once for real, so that libraries and allocators are set up; return what ``run`` returns."""
        ...

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of a fixed address, of the shape, strides, dtype and device of this input, without
        its values.
        """
        ...

    def record(self, run: Callable[[], Any], slot: int = 0) -> Recording:
        """Record ``run`` without running it, in memory that it shares with the recordings of that slot.

        Raises:
            ExecutionError: it does something that can't be recorded. Nothing has changed then.
        """
        ...
