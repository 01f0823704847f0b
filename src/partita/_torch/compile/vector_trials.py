"""Inductor's trials of what a CPU's compiler can do, remembered by later processes.

Before its first kernel for a CPU, Inductor builds a small library for each set of vector instructions, and
loads it in a Python of its own to see that it can. The library stays in its cache, but each process loads it
again: a second a process, one process after the other. A trial that went well is not repeated here as long as
compiler, torch, Python and the CPU's capabilities are the same.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from partita._torch.containers.replaced import replaced

__all__ = ["remembered_trials"]

Trial = Callable[[Any, str], bool]
"""``VecISA.check_build``: of the instructions, with the code that uses them."""


@contextmanager
def remembered_trials() -> Iterator[None]:
    """Inside, trials that went well before are not repeated, and those that go well now are remembered."""
    from torch._inductor.cpu_vec_isa import VecISA

    trial = VecISA.check_build
    if hasattr(trial, "__wrapped__"):  # by another thread, or around this
        yield
        return
    with replaced(VecISA, "check_build", _remembered(trial)):
        yield


def _remembered(trial: Trial) -> Trial:
    @wraps(trial)
    def check_build(instructions: Any, code: str) -> bool:
        went_well = _record(instructions, code)
        if went_well.exists():
            return True
        if not trial(instructions, code):
            return False
        went_well.parent.mkdir(parents=True, exist_ok=True)
        went_well.touch()
        return True

    return check_build


def _record(instructions: Any, code: str) -> Path:
    """The empty file that stands for a trial that went well, in Inductor's cache."""
    from torch._inductor.cpu_vec_isa import _get_isa_dry_compile_fingerprint, x86_isa_checker
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    depends_on = (
        code,
        _get_isa_dry_compile_fingerprint(instructions.build_arch_flags()),
        torch.__file__,
        sys.executable,
        platform.libc_ver(),
        platform.machine(),
        x86_isa_checker(),
    )
    name = hashlib.sha256(repr(depends_on).encode()).hexdigest()
    return Path(cache_dir(), "partita_vector_trials", name)
