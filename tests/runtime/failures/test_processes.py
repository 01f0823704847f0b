"""The end of a process of this machine is seen."""

from __future__ import annotations

import os
import subprocess

import pytest

from partita.runtime.failures.processes import LocalProcesses, own_machine

pytestmark = pytest.mark.skipif(not own_machine(), reason="only Linux lets processes be watched")


def test_a_killed_process_is_gone_also_before_its_parent_asks_for_its_status() -> None:
    process = subprocess.Popen(["sleep", "60"])
    local = LocalProcesses({3: process.pid, 4: os.getpid()})
    assert local.gone() == frozenset()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert local.gone() == {3}
    process.wait()
    assert local.gone() == {3}
    local.close()


def test_a_process_that_ended_before_anybody_looked_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert LocalProcesses({1: process.pid}).gone() == {1}
