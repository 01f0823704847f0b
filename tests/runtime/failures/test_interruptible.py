"""Calls that may block for good have a limit, and end where waiting has no use."""

from __future__ import annotations

import threading

import pytest

from partita.errors import ExecutionError, PeerFailed
from partita.runtime.failures.interruptible import interruptible


def test_the_result_or_the_error_of_the_call_is_that_of_the_caller() -> None:
    assert interruptible(lambda: 3, 5.0, "counting") == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0, 5.0, "counting")


def test_a_call_that_blocks_ends_after_the_limit_or_when_the_check_raises() -> None:
    never = threading.Event()

    def check() -> None:
        raise PeerFailed("rank 2 died", 2)

    try:
        with pytest.raises(ExecutionError, match=r"asking the store took longer than 0.05 s"):
            interruptible(never.wait, 0.05, "asking the store")
        with pytest.raises(PeerFailed, match="rank 2 died"):
            interruptible(never.wait, 60.0, "asking the store", check)
    finally:
        never.set()
