"""How the ranks of a new comm find each other: through the store, which is not needed afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from partita._torch.distributed.groups import Store
from partita.errors import ExecutionError
from partita.runtime.connections import Address, Connection, Listener, connect_all
from partita.runtime.failure import FailureRecord
from partita.runtime.interruptible import interruptible
from partita.runtime.lookout import Team
from partita.runtime.processes import NearProcesses
from partita.runtime.stalls import STALLS
from partita.runtime.whereabouts import WAITING

__all__ = ["meet_all"]

_POLL_S = 0.002
_SLOW_POLL_S = 0.05


class _Meeting:
    """A wait for all ranks of a comm that is being made."""

    def __init__(self, store: Store, team: Team) -> None:
        self.team = team
        self.comm_name = team.name
        self.key = ("meet",)
        self.found: dict[int, Address] = {}
        self._store = store
        self._failure: FailureRecord | None = None
        self._over = threading.Event()

    @property
    def needs(self) -> Sequence[int]:
        """Those that have not come."""
        return [rank for rank in range(len(self.team.processes)) if rank not in self.found]

    def hear(self, record: FailureRecord) -> None:
        """Somebody will not come."""
        self._failure = record

    def check(self) -> None:
        """Raises where waiting has no use any more."""
        if self._failure is not None:
            raise self._failure.to_error()
        for rank in self.needs:
            kind = STALLS.gone.get(self.team.processes[rank])
            if kind is not None:
                raise FailureRecord(rank, kind, "making a comm").to_error()

    def stop(self) -> None:
        """The helper thread that looks into the store has no work any more."""
        self._over.set()

    def look(self, address: Address) -> None:
        """Until all have come, or `stop`. In a thread of its own: the store may block for good."""
        self._store.set(f"watch/{self.team.rank}", address.to_json())
        self.found[self.team.rank] = address
        started = time.monotonic()
        while missing := self.needs:
            for rank in missing:
                if not self._store.check([f"watch/{rank}"]):
                    break
                self.found[rank] = Address.from_json(self._store.get(f"watch/{rank}"))
            else:
                continue
            if self._over.wait(_POLL_S if time.monotonic() - started < 1 else _SLOW_POLL_S):
                return


def meet_all(store: Store, team: Team, seconds: float) -> tuple[dict[int, Connection], NearProcesses]:
    """Returns when all ranks have come: a connection to each, and the processes of those on this machine.

    Args:
        seconds: how long it may take.

    Raises:
        PeerFailed: a rank has ended before it came.
        DeadlockError: ranks wait for each other.
        ExecutionError: some did not come in time, or the store can't be reached.
    """
    size = len(team.processes)
    if size == 1:
        return {}, NearProcesses({})
    listener, meeting = Listener(size), _Meeting(store, team)
    end = time.monotonic() + seconds
    near = NearProcesses({})
    thread = threading.get_ident()
    STALLS.meet(meeting)
    WAITING[thread] = meeting
    try:
        _look(meeting, listener.address, seconds)
        machine = listener.address.machine
        near = NearProcesses(
            {
                rank: address.process
                for rank, address in meeting.found.items()
                if machine and address.machine == machine and rank != team.rank
            }
        )

        def check() -> None:
            for rank in sorted(near.gone()):
                raise FailureRecord(rank, "died").to_error()

        addresses = [meeting.found[rank] for rank in range(size)]
        left_s = max(end - time.monotonic(), 0.1)
        connections = connect_all(
            listener, addresses, team.rank, lost_after_s=team.lost_after_s, seconds=left_s, check=check
        )
    except BaseException:
        near.close()
        raise
    finally:
        meeting.stop()
        listener.close()
        with suppress(KeyError):
            del WAITING[thread]
        STALLS.part(meeting)
    return connections, near


def _look(meeting: _Meeting, address: Address, seconds: float) -> None:
    try:
        interruptible(lambda: meeting.look(address), seconds, "meeting the other ranks", meeting.check)
    except ExecutionError as error:
        missing = [rank for rank in meeting.needs if rank != meeting.team.rank]
        if not missing or len(missing) == len(meeting.team.processes) - 1 or "took longer" not in str(error):
            raise
        raise ExecutionError(
            f"rank {meeting.team.rank} has waited {seconds:g} s for ranks {missing}, which did not come: see "
            "that every rank makes the comm"
        ) from error
