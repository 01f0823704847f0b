"""Hosts on one machine: network namespaces with a switch between them. Only root may make these."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FIRST_ADDRESS", "hosts_on_a_switch", "may_make_hosts", "set_cable"]

_NETWORK = "10.78.0"
FIRST_ADDRESS = f"{_NETWORK}.1"
"""Of the first host. Each has an interface ``cable`` to the switch."""


def may_make_hosts() -> bool:
    """Whether this process may."""
    try:
        with hosts_on_a_switch(1):
            return True
    except (OSError, subprocess.SubprocessError):
        return False


@contextmanager
def hosts_on_a_switch(count: int) -> Iterator[list[str]]:
    """The names of so many namespaces; gone afterwards."""
    own = secrets.token_hex(4)  # what was deleted is there for a while
    names = [f"partita{own}n{number}" for number in range(count)]
    switch = f"p{own}s"
    try:
        if names:
            _ip("link", "add", switch, "type", "bridge")
            _ip("link", "set", switch, "up")
        for number, name in enumerate(names):
            end = f"p{own}e{number}"
            _ip("netns", "add", name)
            _ip("link", "add", end, "type", "veth", "peer", "name", "cable", "netns", name)
            _ip("link", "set", end, "master", switch, "up")
            _ip("-n", name, "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for command in [["netns", "del", name] for name in names] + [["link", "del", switch]] * bool(names):
            subprocess.run(["ip", *command], check=False, capture_output=True, timeout=20)


def set_cable(host: str, *, up: bool) -> None:
    """Plug a host in, or out."""
    _ip("-n", host, "link", "set", "cable", "up" if up else "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
