"""Processes that the demo starts: what they return, and what is said when one fails."""

from __future__ import annotations

import os
import signal

import pytest
import tests.runtime.worlds  # noqa: F401 - sets what the server that processes are forked off has imported

from partita.demo.launch import launch
from partita.errors import ExecutionError


@pytest.fixture(autouse=True)
def _with_the_imports_done(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("dear") is None:  # else as users start them
        monkeypatch.setattr("partita.demo.launch._START_METHOD", "forkserver")


def rank_of(offset: int) -> int:
    return int(os.environ["RANK"]) + offset


def kill_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until the launcher ends this rank too


def raise_on_rank_zero() -> None:
    if os.environ["RANK"] == "0":
        raise ArithmeticError("no such number")
    signal.pause()


@pytest.mark.dear
def test_every_rank_returns_its_result() -> None:
    assert launch(rank_of, 2, 10, name="test") == {0: 10, 1: 11}


def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    with pytest.raises(
        ExecutionError, match=r"rank 1 of the test was killed by SIGKILL \(process \d+\)"
    ) as caught:
        launch(kill_rank_one, 2, name="test")
    pid = int(str(caught.value).partition("process ")[2].partition(")")[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_rank_that_raises_is_named_with_its_exit_status() -> None:
    with pytest.raises(ExecutionError, match=r"rank 0 of the test failed \(process \d+, exit status 1\)"):
        launch(raise_on_rank_zero, 2, name="test")
