"""When the process of another rank is gone, for ranks on one machine.

The system closes a killed process's connections, but not while a child that it forked holds them too: the
workers of a ``DataLoader`` go on for 5 s. So the process itself is watched, where it can be seen: on Linux,
on the same machine and in the same container.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["LocalProcesses", "own_machine"]


def own_machine() -> str:
    """Return a name that processes which can watch each other share; empty where this one can watch none."""
    if sys.platform != "linux":
        return ""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class LocalProcesses:
    """The processes of other ranks on this machine.

    Args:
        numbers: their process ids, by rank.
    """

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self._ranks: dict[int, int] = {}
        self._gone: set[int] = set()
        for rank, number in numbers.items():
            try:
                self._ranks[os.pidfd_open(number)] = rank
            except ProcessLookupError:
                self._gone.add(rank)
            except OSError:  # an old kernel, or a sandbox without it: connections must do
                continue

    def gone(self) -> frozenset[int]:
        """Return the ranks whose processes have ended."""
        poll = select.poll()
        for handle in self._ranks:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(0) if self._ranks else ():
            self._gone.add(self._ranks.pop(handle))
            os.close(handle)
        return frozenset(self._gone)

    @property
    def handles(self) -> tuple[int, ...]:
        """Descriptors that can be read from as soon as a process has ended."""
        return tuple(self._ranks)

    def close(self) -> None:
        for handle in self._ranks:
            os.close(handle)
        self._ranks.clear()
