"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["free_bytes"]

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
