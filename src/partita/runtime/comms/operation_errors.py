"""The errors that a rank raises where an operation of its comm fails or takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from partita.errors import ExecutionError
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.failure_detector import FailureDetector
from partita.runtime.failures.stalls import STALLS
from partita.runtime.failures.thread_activity import Wait, place_of

__all__ = ["OperationErrors"]

_ASK_S = 0.9
"""So long a rank whose time is over asks the others where they are, before it says who did not come."""
_TIMED_OUT = ("timed out", "timing out")
"""What gloo and NCCL say when an operation takes longer than it may."""


class OperationErrors:
    """Turns what gloo and NCCL raise into the failure of the comm, and tells the other ranks of it.

    Args:
        timeout_s: how long an operation may take.
        fail: publishes an error of this rank, and what it was doing.
    """

    def __init__(
        self, detector: FailureDetector, timeout_s: float, fail: Callable[[BaseException, str], None]
    ) -> None:
        self._detector = detector
        self._rank = detector.team.rank
        self._timeout_s = timeout_s
        self._fail = fail
        self._timed_out: ExecutionError | None = None

    def of_wait(self, error: RuntimeError, wait: Wait, what: str) -> ExecutionError:
        """Return what to raise for `error`, which has ended a wait of this thread."""
        if not any(words in str(error).lower() for words in _TIMED_OUT):
            return self.of_connection(error, wait.needs, what)
        if self._detector.failure is None:
            self._blame(wait, what)
        return self._failure()

    def of_connection(self, error: RuntimeError, needs: Sequence[int], what: str) -> ExecutionError:
        """Return what to raise where a connection broke in an operation that needs these ranks."""
        if self._detector.explain(needs, what) is None:
            broken = ExecutionError(
                f"a connection of rank {self._rank} broke in {what}, and no rank is known to have failed: "
                f"look at the network. The system says: {error}"
            )
            self._fail(broken, what)
        return self._failure()

    def _failure(self) -> ExecutionError:
        """Return the failure of the comm; a timeout of this rank's own as it was raised."""
        record = self._detector.failure
        assert record is not None
        if record.rank == self._rank and record.kind == "raised" and self._timed_out is not None:
            return self._timed_out
        return record.to_error()

    def _blame(self, wait: Wait, what: str) -> None:
        """Publish who is to blame for a timeout: a rank that does not answer, whether this rank waits for it
        or another one does; where all answer, this rank, which says where they are.
        """
        absent, needs = STALLS.absent(wait, _ASK_S), tuple(wait.needs)
        silent = [one for one in absent if one.silent_s]
        waited = f"has waited {self._timeout_s:g} s"
        behind = None if silent else STALLS.silent_behind(wait)
        processes = self._detector.team.processes
        if behind is not None and behind[0] in processes:
            summary = (
                f"a rank for which rank {self._rank} {waited} in {what} waits for it, and it has not "
                f"answered for {behind[1]:.1f} s"
            )
            self._detector.publish(FailureRecord(processes.index(behind[0]), "silent", summary=summary))
            return
        if silent:
            summary = (
                f"rank {self._rank} {waited} for it in {what}, and it has not answered for "
                f"{max(silent[0].silent_s, 0.1):.1f} s"
            )
            self._detector.publish(FailureRecord(silent[0].rank, "silent", summary=summary))
            return
        first = absent[0].rank if absent else needs[0] if needs else self._rank
        places = "; ".join(f"rank {one.rank} is in {one.place}" for one in absent[:4] if one.place)
        self._timed_out = ExecutionError(
            f"rank {self._rank} waited {self._timeout_s:g} s in {what}, and rank {first}, though alive, did "
            f"not answer{f' ({places})' if places else ''}: see that both sides take part, or give "
            "ProcessGroupComm.from_group, or init_process_group, a larger timeout"
        )
        self._fail(self._timed_out, f"{place_of(threading.get_ident())} ({what})")
