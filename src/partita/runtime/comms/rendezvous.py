"""How the ranks of a new comm meet: through the store, which is not needed afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from partita._torch.distributed.groups import Store
from partita.errors import ExecutionError
from partita.runtime.failures.connections import Address, Connection, Listener, connect_all
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.failure_detector import Team
from partita.runtime.failures.interruptible import interruptible
from partita.runtime.failures.processes import LocalProcesses
from partita.runtime.failures.stalls import STALLS
from partita.runtime.failures.thread_activity import WAITING

__all__ = ["meet_all"]

_POLL_S = 0.002
_SLOW_POLL_S = 0.05


class _Rendezvous:
    """A wait for all ranks of a comm that is being made."""

    def __init__(self, store: Store, team: Team) -> None:
        self.team = team
        self.comm_name = team.name
        self.key = ("meet",)
        self.addresses: dict[int, Address] = {}
        self._store = store
        self._failure: FailureRecord | None = None
        self._over = threading.Event()

    @property
    def needs(self) -> Sequence[int]:
        """The ranks that have not come."""
        return [rank for rank in range(len(self.team.processes)) if rank not in self.addresses]

    def hear(self, record: FailureRecord) -> None:
        """Take note of a rank that will not come."""
        self._failure = record

    def check(self) -> None:
        """Raise where a rank will not come."""
        if self._failure is not None:
            raise self._failure.to_error()
        for rank in self.needs:
            kind = STALLS.gone.get(self.team.processes[rank])
            if kind is not None:
                raise FailureRecord(rank, kind, "making a comm").to_error()

    def stop(self) -> None:
        """End `look`, which runs in a thread of its own."""
        self._over.set()

    def look(self, address: Address) -> None:
        """Look into the store until all have come. Runs in its own thread: the store may block for good."""
        self._store.set(f"watch/{self.team.rank}", address.to_json())
        self.addresses[self.team.rank] = address
        started = time.monotonic()
        while missing := self.needs:
            for rank in missing:
                if not self._store.check([f"watch/{rank}"]):
                    break
                self.addresses[rank] = Address.from_json(self._store.get(f"watch/{rank}"))
            else:
                continue
            if self._over.wait(_POLL_S if time.monotonic() - started < 1 else _SLOW_POLL_S):
                return


def meet_all(store: Store, team: Team, seconds: float) -> tuple[dict[int, Connection], LocalProcesses]:
    """Wait until all ranks have come; return a connection to each, and the processes on this machine.

    Args:
        seconds: how long it may take.

    Raises:
        PeerFailed: a rank has ended before it came.
        DeadlockError: ranks wait for each other.
        ExecutionError: some did not come in time, or the store can't be reached.
    """
    size = len(team.processes)
    if size == 1:
        return {}, LocalProcesses({})
    listener, rendezvous = Listener(size), _Rendezvous(store, team)
    end = time.monotonic() + seconds
    local = LocalProcesses({})
    thread = threading.get_ident()
    STALLS.meet(rendezvous)
    WAITING[thread] = rendezvous
    try:
        # Exchange addresses through the store.
        _look(rendezvous, listener.address, seconds)
        # Watch the processes on this machine: one may die while the others connect.
        machine = listener.address.machine
        local = LocalProcesses(
            {
                rank: address.process
                for rank, address in rendezvous.addresses.items()
                if machine and address.machine == machine and rank != team.rank
            }
        )

        def check() -> None:
            for rank in sorted(local.gone()):
                raise FailureRecord(rank, "died").to_error()

        # Connect to every other rank.
        addresses = [rendezvous.addresses[rank] for rank in range(size)]
        left_s = max(end - time.monotonic(), 0.1)
        connections = connect_all(
            listener, addresses, team.rank, lost_after_s=team.lost_after_s, seconds=left_s, check=check
        )
    except BaseException:
        local.close()
        raise
    finally:
        rendezvous.stop()
        listener.close()
        with suppress(KeyError):
            del WAITING[thread]
        STALLS.part(rendezvous)
    return connections, local


def _look(rendezvous: _Rendezvous, address: Address, seconds: float) -> None:
    try:
        interruptible(lambda: rendezvous.look(address), seconds, "meeting the other ranks", rendezvous.check)
    except ExecutionError as error:
        team = rendezvous.team
        missing = [rank for rank in rendezvous.needs if rank != team.rank]
        if not missing or len(missing) == len(team.processes) - 1 or "took longer" not in str(error):
            raise
        raise ExecutionError(
            f"rank {team.rank} has waited {seconds:g} s for ranks {missing}, which did not come: see that "
            "every rank makes the comm"
        ) from error
