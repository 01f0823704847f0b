"""The compiled device, and how a process loads it: before torch has asked whether there is a CUDA device."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

__all__ = ["PATH", "load"]

PATH = Path(__file__).parents[2] / "out" / "host_cuda" / "device.so"


def load() -> None:
    """Load it, and what it is linked to, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("there is no torch here")
    libraries = Path(spec.origin).parent / "lib"
    for path in (libraries / "libc10.so", libraries / "libtorch_cpu.so", libraries / "libtorch.so", PATH):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
