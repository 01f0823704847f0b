"""``torchrun --nnodes 2`` between two network namespaces, each with process numbers of its own: two hosts, as
far as the processes can tell.

::

    namespace partita-...-0                       namespace partita-...-1
    10.213.7.1  veth -------------------------- veth  10.213.7.2
    torchrun: rendezvous, rank 0                  torchrun: rank 1
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.composition.two_hosts import STEPS
from tests.pipelining.models import TRANSFORMER
from tests.pipelining.running import keyed

from partita.pipelining import UncutReference

ROOT = Path(__file__).parent.parent.parent
ADDRESSES = ("10.213.7.1", "10.213.7.2")
LIMIT_S = 100.0
CAPABILITY = "CAP_SYS_ADMIN and CAP_NET_ADMIN, as root has outside of containers, or in a privileged one"


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that a cable joins; skips where this user may not make any."""
    for command in ("ip", "unshare"):
        if shutil.which(command) is None:
            pytest.skip(f"needs the command {command} (packages iproute2 and util-linux)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces: run it as root, or with sudo")
    names = (f"partita-{os.getpid()}-0", f"partita-{os.getpid()}-1")
    cable = (f"pt{os.getpid() % 100000}a", f"pt{os.getpid() % 100000}b")
    try:
        for name in names:
            made = _ip("netns", "add", name)
            if made.returncode:
                pytest.skip(
                    f"needs the right to make network namespaces ({CAPABILITY}): {made.stderr.strip()}"
                )
        _checked("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            _checked("link", "set", end, "netns", name)
            _checked("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _checked("-n", name, "link", "set", end, "up")
            _checked("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)
        _ip("link", "del", cable[0])  # still here where it was not moved


def _checked(*words: str) -> None:
    made = _ip(*words)
    if made.returncode:
        pytest.skip(f"needs `ip {' '.join(words)}` to be permitted ({CAPABILITY}): {made.stderr.strip()}")


def _start(name: str, number: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    interface = _ip("-n", name, "-o", "-4", "addr", "show", "to", ADDRESSES[number]).stdout.split()[1]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": interface,
        "PARTITA_HOST": str(number),
        "PYTHONPATH": str(ROOT),
    }
    command = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child"]
    command += [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "partita"]
    command += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29513", "--local-addr", ADDRESSES[number]]
    command += ["--rdzv-conf", f"is_host={int(number == 0)}"]  # names don't lead to these addresses
    command += [str(ROOT / "tests" / "composition" / "two_hosts.py"), str(folder), *options]
    with (folder / f"{number}.log").open("w") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _codes(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """How they end; None where one does not. None outlives the call, and neither do their workers."""
    try:
        return [process.wait(LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        return [None, None]
    finally:
        for process in processes:
            process.kill()  # all that has its number from there ends with it
            process.wait()


def _logs(folder: Path) -> str:
    return "".join((folder / f"{number}.log").read_text() for number in range(2))


@pytest.mark.dear
def test_two_hosts_train_what_one_process_trains(hosts: tuple[str, str], tmp_path: Path) -> None:
    processes = [_start(name, number, tmp_path) for number, name in enumerate(hosts)]
    assert _codes(processes) == [0, 0], _logs(tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert {record["host"] for record in found} == {"0", "1"}

    whole = keyed(TRANSFORMER)
    runner = UncutReference(whole, 4, TRANSFORMER.loss)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(STEPS):
        args, _, target = TRANSFORMER.data(8, seed=step)
        losses: list[torch.Tensor] = []
        runner.step(*args, target=target, losses=losses)
        torch.nn.utils.clip_grad_norm_(list(whole.parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    (last,) = [record["losses"] for record in found if record["losses"]]
    assert all(torch.equal(one, other) for one, other in zip(last, losses, strict=True))
    for record in found:
        for name, value in record["state"].items():
            assert torch.equal(value, whole.get_parameter(name)), name


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.dear), 1])
def test_a_rank_killed_on_one_host_is_named_on_the_other(
    hosts: tuple[str, str], tmp_path: Path, killed: int
) -> None:
    processes = [_start(name, number, tmp_path, str(killed)) for number, name in enumerate(hosts)]
    assert _codes(processes) == [1, 1], _logs(tmp_path)
    (path,) = tmp_path.glob("*.failed.pt")
    survivor = int(path.name[0])
    found = torch.load(path)
    assert found["host"] == str(1 - killed)
    assert f"rank {1 - survivor} died without a word" in found["text"]
    seconds = found["at_s"] - float((tmp_path / "killed_at_s").read_text())
    print(f"seconds until known (killed on host {killed}): {seconds:.2f}")  # noqa: T201
