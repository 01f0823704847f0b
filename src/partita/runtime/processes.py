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

__all__ = ["NearProcesses", "own_machine"]


def own_machine() -> str:
    """A name for the processes that this one can watch; empty where it can't watch any."""
    if sys.platform != "linux":
        return ""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class NearProcesses:
    """Those of other ranks on this machine.

    Args:
        numbers: the system's number of each process, by rank.
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
        """The ranks whose processes have ended."""
        poll = select.poll()
        for handle in self._ranks:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(0) if self._ranks else ():
            self._gone.add(self._ranks.pop(handle))
            os.close(handle)
        return frozenset(self._gone)

    @property
    def handles(self) -> tuple[int, ...]:
        """Descriptors that can be read from as soon as `gone` has something to tell."""
        return tuple(self._ranks)

    def close(self) -> None:
        """Looks no longer."""
        for handle in self._ranks:
            os.close(handle)
        self._ranks.clear()
