"""The sockets over which ranks tell each other of failures: one between each two ranks of a comm, beside
those that carry tensors.

A message is a line of JSON. Between messages the two *kernels* exchange a probe every few seconds (TCP
keepalive). So a host or a network that is gone is noticed, and a process that computes, holds the interpreter
lock or is stopped does not count as gone.

::

    every rank      listens; puts its address and a token into the store
    all have come   rank r connects to 0 .. r-1 with their tokens, and lets r+1 .. in
    from here on    the store is not needed
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from partita.errors import ExecutionError
from partita.runtime.failures.processes import own_machine

__all__ = ["Address", "Connection", "Listener", "connect_all"]

_HELLO_S = 5.0
_MAX_LINE = 1 << 24
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Address:
    """Where a rank can be reached, as it is written to the store.

    Attributes:
        host, port: what to connect to.
        token: what to send first; other connections are refused.
        machine: equal for processes that can watch each other; empty for one that can't be watched.
        process: the process id on that machine.
        purpose: what the rank makes the comm for, in words; empty where it has not said.
    """

    host: str
    port: int
    token: str
    machine: str
    process: int
    purpose: str = ""

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Address:
        """Read what `to_json` returned."""
        return cls(**json.loads(text))


class Connection:
    """One end of a connection for short messages; any thread may send.

    Args:
        sock: connected.
        lost_after_s: after so many seconds without an answer from the other host it counts as gone.
    """

    def __init__(self, sock: socket.socket, lost_after_s: float) -> None:
        _probe(sock, lost_after_s)
        sock.setblocking(False)
        self._socket = sock
        self._lock = threading.Lock()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.handle = sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something has not been sent yet."""
        return bool(self._outgoing)

    def send(self, message: dict[str, object]) -> None:
        """Send a message, now or later: it never blocks and never raises (an end is noticed by reading)."""
        with self._lock:
            self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        with self._lock, suppress(OSError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def receive(self) -> tuple[list[dict[str, object]], str | None]:
        """Return the messages that have come; and ``closed`` or ``lost`` where the connection has ended."""
        end = None
        try:
            while data := self._socket.recv(65536):
                self._incoming += data
            end = "closed"
        except BlockingIOError:
            pass
        except (ConnectionResetError, BrokenPipeError):
            end = "closed"
        except OSError:  # the kernel has given up on the other host
            end = "lost"
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        if len(rest) > _MAX_LINE:
            return [], "closed"
        return [json.loads(line) for line in lines], end

    def end(self) -> None:
        """Send nothing more; what was sent arrives."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Where this rank waits for those that connect to it."""

    def __init__(self, size: int) -> None:
        host = _own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=max(size, 1))
        self._socket.setblocking(False)
        self.address = Address(
            host, self._socket.getsockname()[1], secrets.token_hex(16), own_machine(), os.getpid()
        )

    def accept(self) -> tuple[int, socket.socket] | None:
        """Return a rank that has connected, and its socket; None where none has, or a stranger."""
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        sock.settimeout(_HELLO_S)
        try:
            hello = _exactly(sock, 4 + len(self.address.token))
        except OSError:
            hello = b""
        if not secrets.compare_digest(hello[4:], self.address.token.encode()):
            sock.close()
            return None
        return struct.unpack("!I", hello[:4])[0], sock

    def close(self) -> None:
        self._socket.close()


def connect_all(
    listener: Listener,
    addresses: Sequence[Address],
    rank: int,
    *,
    lost_after_s: float,
    seconds: float,
    check: Callable[[], None],
) -> dict[int, Connection]:
    """Return a connection to each other rank.

    Args:
        addresses: those of all ranks.
        seconds: how long it may take.
        check: raises where a rank is known to have ended meanwhile.

    Raises:
        ExecutionError: a rank can't be reached, or does not come in time.
    """
    end = time.monotonic() + seconds
    connected: dict[int, Connection] = {}
    try:
        for peer in range(rank):
            connected[peer] = Connection(_connected(addresses[peer], rank, peer, seconds), lost_after_s)
        pause = threading.Event()
        while len(connected) < len(addresses) - 1:
            came = listener.accept()
            if came is not None:
                connected[came[0]] = Connection(came[1], lost_after_s)
                continue
            check()
            if time.monotonic() > end:
                missing = sorted(set(range(len(addresses))) - {rank, *connected})
                raise ExecutionError(f"ranks {missing} did not connect to rank {rank} within {seconds:g} s")
            pause.wait(0.002)
    except BaseException:
        for connection in connected.values():
            connection.close()
        raise
    return connected


def _connected(address: Address, rank: int, peer: int, seconds: float) -> socket.socket:
    try:
        sock = socket.create_connection((address.host, address.port), timeout=seconds)
        sock.sendall(struct.pack("!I", rank) + address.token.encode())
    except OSError as error:
        raise ExecutionError(
            f"rank {rank} can't reach rank {peer} at {address.host} port {address.port}: {error}"
        ) from error
    return sock


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def _probe(sock: socket.socket, lost_after_s: float) -> None:
    """Let the kernel probe whether the other host is there: on Linux to a second, elsewhere as far as the
    system has these options.
    """
    every = max(1, round(lost_after_s / 15))
    idle = max(1, round(lost_after_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": idle,
        "TCP_KEEPALIVE": idle,  # the same on macOS
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": max(1, round((lost_after_s - idle) / every)),
        "TCP_USER_TIMEOUT": max(1, round(1000 * (lost_after_s - every))),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _own_host() -> str:
    """Return this host's address, chosen as gloo does: that of ``GLOO_SOCKET_IFNAME``, or that of the host's
    name where it is the host's own; else loopback.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    candidates = []
    if interface:
        candidates.append(_of_interface(interface))
    else:
        with suppress(OSError):
            resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            candidates += [str(address[0]) for *_, address in resolved]
    for host in candidates:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, 0))
            return host
    return "127.0.0.1"


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            return _ipv6_of_interface(name)


def _ipv6_of_interface(name: str) -> str:
    with suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope in ("00", "10"):  # global, or of the host itself
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise ExecutionError(f"GLOO_SOCKET_IFNAME is {name!r}, which has no address: name another interface")
