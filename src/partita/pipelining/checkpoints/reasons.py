"""What torch's saving and loading says, and does not need to say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["be_quiet_alone", "quiet_alone", "reason"]


@contextmanager
def quiet_alone() -> Iterator[None]:
    """torch warns whenever one process saves or loads alone, also where it was told to."""
    with warnings.catch_warnings():
        be_quiet_alone()
        yield


def be_quiet_alone() -> None:
    """From now on: what a thread does can't be told apart from what others do meanwhile."""
    warnings.filterwarnings("ignore", message=".*in a single process.*", category=UserWarning)


def reason(error: BaseException) -> str:
    """What went wrong, and on which rank where torch tells; its own text is pages of tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return repr(error)
