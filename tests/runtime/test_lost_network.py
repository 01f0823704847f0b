"""A network that is gone: no process dies and nothing is closed. Two hosts are two network namespaces here;
only root may make these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.runtime.hosts import FIRST_ADDRESS, hosts_on_a_switch, may_make_hosts, set_cable

LOST_AFTER_S = 4.0
SCRIPT = f"""
import os, sys, time
import torch, torch.distributed as dist
from partita.runtime import ProcessGroupComm
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://{FIRST_ADDRESS}:29511", rank=rank, world_size=2)
comm = ProcessGroupComm.from_group(lost_after_s={LOST_AFTER_S})
comm.barrier()
print("ready", flush=True)
try:
    comm.recv(torch.empty(1), 1 - rank).wait() if sys.argv[2] == "wait" else sys.stdin.readline()
    if sys.argv[2] != "wait":
        comm.barrier()
        comm.close()
    print("fine", flush=True)
except Exception as error:
    print(type(error).__name__, error.rank, str(error).partition(";")[0], flush=True)
sys.stdin.readline()  # who ends would be seen by the other, which is on this machine in truth
os._exit(0)
"""


pytestmark = [
    pytest.mark.skipif(not may_make_hosts(), reason="only root may make network namespaces"),
    pytest.mark.timeout(90),
]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with hosts_on_a_switch(2) as names:
        yield names


@pytest.fixture
def run(hosts: list[str]) -> Iterator[Callable[[str], list[subprocess.Popen[str]]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(mode: str) -> list[subprocess.Popen[str]]:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable"}
        for rank, host in enumerate(hosts):
            command = ["ip", "netns", "exec", host, sys.executable, "-c", SCRIPT, str(rank), mode]
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                )
            )
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_both_hosts_know_within_the_limit(hosts: list[str], run: Callable[..., list[Any]]) -> None:
    processes = run("wait")
    set_cable(hosts[0], up=False)
    for rank, process in enumerate(processes):
        assert process.stdout.readline() == (
            f"PeerFailed {1 - rank} rank {1 - rank} can't be reached: its host has not answered for 4 s\n"
        )


def test_a_cable_that_is_out_for_less_goes_on(hosts: list[str], run: Callable[..., list[Any]]) -> None:
    processes = run("go on")
    set_cable(hosts[0], up=False)
    with pytest.raises(subprocess.TimeoutExpired):
        processes[0].wait(LOST_AFTER_S / 4)
    set_cable(hosts[0], up=True)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.stdout.readline() for process in processes] == ["fine\n"] * 2
