"""How much memory is free."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

__all__ = ["free_bytes", "too_little"]

_MEMINFO = Path("/proc/meminfo")
_LIMIT, _USED = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a process can still take on a device; None where that can't be told.

    >>> free = free_bytes(torch.device("cpu"))
    >>> free is None or free > 0
    True
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    if _LIMIT.exists() and (limit := _LIMIT.read_text().strip()).isdigit():
        free = min(free, int(limit) - int(_USED.read_text()))  # a container's own limit
    return free


def too_little(needed: int, devices: Iterable[torch.device]) -> tuple[torch.device, int] | None:
    """The first of the devices that has fewer free bytes than are needed, and how many it has; None where
    all have enough, or can't tell.

    >>> too_little(1, [torch.device("cpu")]) is None
    True
    """
    for device in dict.fromkeys(devices):
        free = free_bytes(device)
        if free is not None and needed > free:
            return device, free
    return None
