"""Hosts on one machine: network namespaces joined by a bridge, each with a link of a set speed.

    hub  [ bridge ]---veth---[ host 0: link0, tbf rate R ]
             |------veth-----[ host 1: link0, tbf rate R ]

A transfer on such a link takes time and next to no processor, so communication that is hidden shows as a
gain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partita.errors import UsageError

__all__ = ["INTERFACE", "hosts", "sent_bytes", "set_rate"]

INTERFACE = "link0"


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Make ``count`` network namespaces that reach each other, and yield their names; remove them afterwards.

    Raises:
        UsageError: this process may not make them.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise UsageError("this benchmark shapes links with `ip` and `tc`: install iproute2")
    prefix = f"partita-{os.getpid()}"
    hub, names = f"{prefix}-hub", [f"{prefix}-{number}" for number in range(count)]
    namespaces: list[str] = []
    try:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            namespaces.append(name)
        _run("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _run(
                "ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name
            )
            _run("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in reversed(namespaces):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def set_rate(megabits_per_s: float | None) -> None:
    """Shape the link of the namespace that this process runs in; None takes the limit away."""
    root = ("tc", "qdisc", "replace", "dev", INTERFACE, "root")
    if megabits_per_s is None:
        _run(*root, "noqueue")
    else:
        rate = f"{max(1, round(megabits_per_s))}mbit"
        _run(*root, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")


def sent_bytes() -> int:
    """How much the link of the namespace that this process runs in has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text(encoding="ascii"))


def _run(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise UsageError(
            f"`{' '.join(command)}` failed: {result.stderr.strip()}. This benchmark makes network "
            "namespaces, which needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and a kernel with veth, "
            "bridge and tbf: run it in a virtual machine or a privileged container"
        )
