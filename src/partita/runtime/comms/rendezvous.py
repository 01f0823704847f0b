"""How the ranks of a new comm meet: through the store, which is not needed afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from partita._torch.distributed.groups import Store
from partita.errors import ExecutionError, SignatureMismatch
from partita.runtime.failures.connections import Address, Connection, Listener, connect_all
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.failure_detector import Team
from partita.runtime.failures.interruptible import interruptible
from partita.runtime.failures.processes import LocalProcesses
from partita.runtime.failures.stalls import STALLS
from partita.runtime.failures.thread_activity import WAITING, doing_now

__all__ = ["meet_all"]

_POLL_S = 0.002
_SLOW_POLL_S = 0.05
_QUIET_S = 30.0
"""After so long a wait the log says for whom."""
_ADVICE = (
    "let every rank of the process group make the same collective calls in the same order, or give the group "
    "of those ranks that do (process_group=, build_stage(group=))"
)
_LOG = logging.getLogger("partita.runtime")


class _Rendezvous:
    """A wait for all ranks of a comm that is being made."""

    def __init__(self, store: Store, team: Team) -> None:
        self.team = team
        self.comm_name = team.name
        self.key = ("meet",)
        self.purpose = doing_now(threading.get_ident())
        self.addresses: dict[int, Address] = {}
        self._store = store
        self._failure: FailureRecord | None = None
        self._over = threading.Event()
        self._speaks_at: float | None = time.monotonic() + _QUIET_S

    @property
    def needs(self) -> Sequence[int]:
        """The ranks that have not come."""
        return [rank for rank in range(len(self.team.processes)) if rank not in self.addresses]

    def missed(self, seconds: float) -> str:
        """For whom this rank has waited so long, in words."""
        missing = [rank for rank in self.needs if rank != self.team.rank]
        where = self.purpose and f" ({self.purpose})"
        return (
            f"rank {self.team.rank} has waited {seconds:g} s for ranks {missing}, which did not come{where}: "
            f"{_ADVICE}"
        )

    def hear(self, record: FailureRecord) -> None:
        """Take note of a rank that will not come."""
        self._failure = record

    def check(self) -> None:
        """Raise where a rank will not come, or has come to something else."""
        if self._failure is not None:
            raise self._failure.to_error()
        self.check_purposes()
        for rank in self.needs:
            kind = STALLS.gone.get(self.team.processes[rank])
            if kind is not None:
                raise FailureRecord(rank, kind, "making a comm").to_error()
        if self._speaks_at is not None and time.monotonic() > self._speaks_at:
            self._speaks_at = None
            _LOG.warning(self.missed(_QUIET_S))

    def check_purposes(self) -> None:
        """Raise where a rank has come to something else: on each rank, as each sees all that come."""
        for rank, address in list(self.addresses.items()):
            if self.purpose and address.purpose and address.purpose != self.purpose:
                raise SignatureMismatch(
                    f"rank {self.team.rank} is in {self.purpose} and rank {rank} in {address.purpose}, where "
                    f"they meet each other: {_ADVICE}"
                )

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
        SignatureMismatch: ranks make comms for different calls.
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
        _look(rendezvous, replace(listener.address, purpose=rendezvous.purpose), seconds)
        rendezvous.check_purposes()
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
        raise ExecutionError(rendezvous.missed(seconds)) from error
