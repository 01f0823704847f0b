"""Shorter errors, and no needless warnings, from torch's saving and loading."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["be_quiet_alone", "quiet_alone", "reason"]


@contextmanager
def quiet_alone() -> Iterator[None]:
    """Silence torch's warning that a process saves or loads alone, which is intended here."""
    with warnings.catch_warnings():
        be_quiet_alone()
        yield


def be_quiet_alone() -> None:
    """Silence it for good, since filters are shared by all threads: for what runs beside training."""
    warnings.filterwarnings("ignore", message=".*in a single process.*", category=UserWarning)


def reason(error: BaseException) -> str:
    """The error, with its rank where torch says it, without torch's pages of tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return repr(error)
