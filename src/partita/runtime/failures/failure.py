"""Which rank failed, and how: a record that travels between ranks, and the error that it becomes."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Literal

from partita.errors import DeadlockError, ExecutionError, PeerFailed

__all__ = ["FailureRecord", "Kind"]

Kind = Literal["raised", "died", "lost", "silent", "left", "deadlock"]
_DEADLOCK = (
    "ranks wait for each other: ",
    ". Let all ranks make the same collective calls in the same order",
)
"""What a message says before and after the places where they wait."""
_ORDER: tuple[Kind, ...] = ("raised", "died", "lost", "silent", "left", "deadlock")


@dataclass(frozen=True)
class FailureRecord:
    """The failure of a rank. It travels as JSON.

    Attributes:
        rank: the rank that failed; of a ``deadlock`` the first that is part of it.
        kind: ``raised`` an exception; ``died`` without one; ``lost``: its host does not answer any more;
            ``silent``: the host answers, the process does not; ``left`` while others needed it; ``deadlock``:
            ranks wait for each other.
        where: what it was doing.
        summary: the exception's type and text, in one line; of a deadlock, where each rank waits.
        traceback_text: its traceback; empty unless it raised.
        ring: of a deadlock, the processes that wait for each other. They end one after the other, as a
            consequence of it.
    """

    rank: int
    kind: Kind
    where: str = ""
    summary: str = ""
    traceback_text: str = ""
    ring: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ring", tuple(self.ring))  # JSON has made a list of it

    @classmethod
    def of(cls, rank: int, error: BaseException, where: str) -> FailureRecord:
        """Return the record of `error`, raised on `rank`. A `PeerFailed` is blamed on the rank it names; a
        deadlock, which ends the ranks that are part of it one after the other, stays one.
        """
        before, after = _DEADLOCK
        if isinstance(error, DeadlockError) and str(error).startswith(before):
            return cls(rank, "deadlock", summary=str(error).removeprefix(before).removesuffix(after))
        if isinstance(error, PeerFailed):
            return cls(
                error.rank,
                "raised" if error.traceback_text else "died",
                where,
                str(error),
                error.traceback_text,
            )
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        return cls(rank, "raised", where, summary, "".join(traceback.format_exception(error)))

    @property
    def order(self) -> tuple[int, int]:
        """The key by which all ranks take the same failure, the lowest, of several at about the same time."""
        return _ORDER.index(self.kind), self.rank

    def to_error(self) -> ExecutionError:
        """Return what the other ranks raise: `DeadlockError` for a deadlock, else `PeerFailed`."""
        if self.kind == "deadlock":
            return DeadlockError(self.summary.join(_DEADLOCK))
        return PeerFailed(self._message(), self.rank, self.traceback_text)

    def _message(self) -> str:
        if self.kind == "raised":
            return f"rank {self.rank} failed in {self.where}: {self.summary}\n\n{self.traceback_text}"
        if self.kind == "left":
            return (
                f"rank {self.rank} left while another rank still waited for it{self._in_where()}: check that "
                "all ranks take the same number of steps and close together"
            )
        if self.kind == "lost":
            return (
                f"rank {self.rank} can't be reached: {self.summary}; look at the network between the hosts, "
                "and whether that host runs. Start all ranks again from a checkpoint"
            )
        if self.kind == "silent":
            return (
                f"rank {self.rank} gives no sign of life: {self.summary}; its process is there, but stopped "
                "(SIGSTOP, a debugger) or stuck outside of Python. Start all ranks again from a checkpoint, "
                "or give a larger timeout_s"
            )
        return (
            f"rank {self.rank} died without a word (killed?): look at that process's own output, "
            "its exit status and the system's log (out of memory?)"
        )

    def _in_where(self) -> str:
        return f" in {self.where}" if self.where else ""
