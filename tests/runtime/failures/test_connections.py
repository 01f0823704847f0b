"""Who watches whom over a socket: strangers are not let in, messages arrive, an end is seen."""

from __future__ import annotations

import select
import socket

import pytest

from partita.runtime.failures.connections import Address, Connection, Listener


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return Listener(2)


def _wait_for(handle: int) -> None:
    select.select([handle], [], [], 10.0)


def test_who_does_not_know_the_token_is_not_let_in(listener: Listener) -> None:
    address = listener.address
    assert Address.from_json(address.to_json()) == address
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(bytes(4) + b"x" * len(address.token))
        assert listener.accept() is None
    listener.close()


def test_messages_of_any_length_arrive_and_the_end_is_seen() -> None:
    here, there = (Connection(sock, 15.0) for sock in _pair())
    text = "x" * 300_000
    here.send({"failed": text})
    here.send({"left": [[["sent", 1, 0], 3]]})
    said: list[dict[str, object]] = []
    while len(said) < 2:
        here.flush()
        _wait_for(there.handle)
        said += there.receive()[0]
    assert said == [{"failed": text}, {"left": [[["sent", 1, 0], 3]]}]
    here.close()
    _wait_for(there.handle)
    assert there.receive() == ([], "closed")
    there.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other
