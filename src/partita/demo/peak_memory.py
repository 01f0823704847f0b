"""The most memory that a process held, as the system counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["PeakMemory"]

_STATUS = Path("/proc/self/status")
_NEW_PEAK = Path("/proc/self/clear_refs")


class PeakMemory:
    """Counts from what the process holds when this is made: its imports are no part of a model's memory.

    Linux only; elsewhere there is nothing to read.
    """

    NOTE = "the process at its fullest, less what it held before the model was made"

    def __init__(self) -> None:
        self._baseline = _read("VmRSS")

    def start_anew(self) -> None:
        """Forget the peak so far, where the system lets a process do so."""
        with suppress(OSError):
            _NEW_PEAK.write_text("5", encoding="ascii")

    def bytes(self) -> int | None:
        """The peak; None where the system does not say."""
        peak = _read("VmHWM")
        return None if peak is None or self._baseline is None else max(0, peak - self._baseline)


def _read(name: str) -> int | None:
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
