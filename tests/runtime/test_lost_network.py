"""A network that is gone: no process dies and nothing is closed. Two hosts are two network namespaces here,
and the cable between them a pair of virtual interfaces; only root may make these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

LOST_AFTER_S = 4.0
SCRIPT = f"""
import os, sys, time
import torch, torch.distributed as dist
from partita.runtime import ProcessGroupComm
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29511", rank=rank, world_size=2)
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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def _may_make_hosts() -> bool:
    try:
        name = f"partita-probe-{os.getpid()}"  # several processes ask at once
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not _may_make_hosts(), reason="only root may make network namespaces"),
    pytest.mark.timeout(90),
]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    names = (f"partita{os.getpid()}a", f"partita{os.getpid()}b")
    ends = (f"p{os.getpid()}a", f"p{os.getpid()}b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", "cable")
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@pytest.fixture
def run(hosts: tuple[str, str]) -> Iterator[Callable[[str], list[subprocess.Popen[str]]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(mode: str) -> list[subprocess.Popen[str]]:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
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


def test_both_hosts_know_within_the_limit(hosts: tuple[str, str], run: Callable[..., list[Any]]) -> None:
    processes = run("wait")
    _ip("-n", hosts[0], "link", "set", "cable", "down")
    for rank, process in enumerate(processes):
        assert process.stdout.readline() == (
            f"PeerFailed {1 - rank} rank {1 - rank} can't be reached: its host has not answered for 4 s\n"
        )


def test_a_cable_that_is_out_for_less_goes_on(hosts: tuple[str, str], run: Callable[..., list[Any]]) -> None:
    processes = run("go on")
    _ip("-n", hosts[0], "link", "set", "cable", "down")
    with pytest.raises(subprocess.TimeoutExpired):
        processes[0].wait(LOST_AFTER_S / 4)
    _ip("-n", hosts[0], "link", "set", "cable", "up")
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.stdout.readline() for process in processes] == ["fine\n"] * 2
