"""Waits that take long: which rank has not begun its part, what it does, and whether there is a deadlock.

A rank that has waited for a second asks those that it waits for whether they have begun their part, and what
they do. Each of them answers with what it waits for itself, if it does, and what it has heard of others. So
a ring of ranks that wait for each other is found by all of its members::

    rank 0   save_checkpoint() ──── waits for ────▶ rank 1
       ▲                                              │
       └───────────── waits for ────── step() number 3

Rank 1 has not begun its part of rank 0's wait, and can't as long as its own wait lasts; and the other way
round. Each wait has a number in its process, so that what was heard of one is never taken for another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from partita.runtime.failures.failure import FailureRecord, Kind
from partita.runtime.failures.thread_activity import WAITING, Wait, doing_now, place_of
from partita.runtime.failures.watch import WATCH

__all__ = ["STALLS", "Absent", "Rendezvous"]

_ASK_S = 1.0
_LONG_S = 2.0
"""A wait shorter than this is never part of a ring."""

_MOST_ASKED = 8
_SLOWEST_S = 10.0
Node = tuple[int, int]
"""A wait: the process, and its number there."""


class AnsweringDetector(Protocol):
    """The methods of a failure detector that are used here."""

    team: Any
    thread: int

    @property
    def leavers(self) -> Collection[int]: ...

    def has_come(self, peer: int, key: tuple[Any, ...]) -> bool: ...

    def left_without(self, peer: int, key: tuple[Any, ...]) -> bool: ...

    def send(self, peer: int, message: dict[str, Any]) -> bool: ...

    def hear(self, record: FailureRecord) -> None: ...


class Rendezvous(Protocol):
    """A comm that is being made: its ranks have no connections yet."""

    team: Any

    def hear(self, record: FailureRecord) -> None: ...


@dataclass(frozen=True)
class Absent:
    """A rank that has not begun its part.

    Attributes:
        place: what it does, in its own words; empty where it has said nothing.
        silent_s: for how many seconds it has not answered.
    """

    rank: int
    place: str = ""
    silent_s: float = 0.0


@dataclass(frozen=True)
class Facts:
    """What is known of a wait.

    Attributes:
        comm: its comm's name.
        rank: the rank that waits, in that comm.
        place: what that rank does, in words.
        blocked_by: the waits of the ranks that have not begun their part.
        silent: the processes of such ranks that have not answered, and for how many seconds.
    """

    comm: str
    rank: int
    place: str
    blocked_by: tuple[Node, ...]
    silent: tuple[tuple[int, float], ...] = ()


@dataclass
class _Stall:
    """A wait of this process."""

    wait: Wait
    thread: int
    number: int
    since: float
    asks_at: float
    pause_s: float = _ASK_S
    asked: dict[int, float] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    absent: dict[int, Absent] = field(default_factory=dict)
    come: set[int] = field(default_factory=set)
    blocked_by: dict[int, Node] = field(default_factory=dict)


class _Stalls:
    """The waits of this process. Only the watch thread calls methods below the line that says so."""

    def __init__(self) -> None:
        self.gone: dict[int, Kind] = {}
        self._comms: dict[str, AnsweringDetector] = {}
        self._begun: set[str] = set()
        self._meetings: dict[str, Rendezvous] = {}
        self._stalls: dict[tuple[int, str, tuple[Any, ...]], _Stall] = {}
        self._facts: dict[Node, Facts] = {}
        self._numbers = 0
        self._world = 0
        self._last_look = time.monotonic()
        self._hurry = False

    # For every thread.

    def in_world(self, world: int) -> None:
        """Forget which processes have gone, where ``torch.distributed`` has numbered them anew."""
        if world != self._world:
            self._world = world
            self.gone.clear()

    def add(self, comm: AnsweringDetector) -> None:
        self._begun.add(comm.team.name)
        self._comms[comm.team.name] = comm
        WATCH.stalls = self.look

    def remove(self, comm: AnsweringDetector) -> None:
        self._comms.pop(comm.team.name, None)

    def meet(self, place: Rendezvous) -> None:
        """Add a comm that is being made, until `part`."""
        self._begun.add(place.team.name)
        self._meetings[place.team.name] = place

    def part(self, place: Rendezvous) -> None:
        """Remove a comm whose ranks have come, or that was given up."""
        self._meetings.pop(place.team.name, None)

    def absent(self, wait: Wait, seconds: float) -> list[Absent]:
        """Ask now, and return which ranks have not begun their part of a wait of the calling thread."""
        key = (threading.get_ident(), wait.comm_name, wait.key)
        began, pause = time.monotonic(), threading.Event()
        self._hurry = True
        WATCH.wake()
        while time.monotonic() < began + seconds:
            stall = self._stalls.get(key)
            if stall is not None and all(
                rank in stall.come or stall.heard.get(rank, 0.0) >= began for rank in wait.needs
            ):
                break
            pause.wait(0.01)
        stall = self._stalls.get(key)
        if stall is None:
            return [Absent(rank) for rank in wait.needs]
        now = time.monotonic()
        missing = []
        for rank in wait.needs:
            if rank in stall.come:
                continue
            since = stall.asked.get(rank)
            if since is None or stall.heard.get(rank, 0.0) >= began:  # who is asked once more is not silent
                missing.append(stall.absent.get(rank, Absent(rank)))
            else:
                missing.append(Absent(rank, silent_s=max(now - since, 0.001)))
        return missing

    def silent_behind(self, wait: Wait) -> tuple[int, float] | None:
        """Return a process that does not answer, and for how many seconds, where those that the calling
        thread waits for wait for it; None where none has told of one. Call `absent` before.
        """
        stall = self._stalls.get((threading.get_ident(), wait.comm_name, wait.key))
        ahead = [] if stall is None else list(stall.blocked_by.values())
        for node in ahead:
            facts = self._facts.get(node)
            if facts is not None and facts.silent:
                return max(facts.silent, key=lambda one: one[1])
            ahead += [other for other in (() if facts is None else facts.blocked_by) if other not in ahead]
        return None

    # For the watch thread only.

    def look(self, now: float) -> None:
        """Look at the waits of this process; ask other ranks, and conclude from their answers."""
        if now - self._last_look > _LONG_S:  # this process itself was stopped: nobody was silent meanwhile
            for stall in self._stalls.values():
                stall.asked = dict.fromkeys(stall.asked, now)
        self._last_look = now
        waits = {(thread, wait.comm_name, wait.key): wait for thread, wait in list(WAITING.items())}
        hurry, self._hurry = self._hurry, False
        for key in self._stalls.keys() - waits.keys():
            del self._stalls[key]
        for key, wait in waits.items():
            if key not in self._stalls:
                self._numbers += 1
                self._stalls[key] = _Stall(wait, key[0], self._numbers, now, now + _ASK_S)
            stall = self._stalls[key]
            if hurry or now >= stall.asks_at:
                stall.pause_s = min(2 * stall.pause_s, _SLOWEST_S)
                stall.asks_at = now + (_ASK_S if stall.blocked_by else stall.pause_s)
                self._ask(stall, now)
        for stall in list(self._stalls.values()):
            if now - stall.since > _ASK_S:
                self._find_leaver(stall)
            if now - stall.since > _LONG_S:
                self._find_ring(stall)
        if not self._stalls:
            self._facts.clear()

    def _ask(self, stall: _Stall, now: float) -> None:
        team = self._team_of(stall.wait.comm_name)
        if team is None:
            return
        rank, processes = team
        asked = 0
        for peer in stall.wait.needs:
            if peer in stall.come or peer in stall.asked or asked >= _MOST_ASKED:
                continue
            wait = stall.wait
            ask = {"ask": stall.number, "comm": wait.comm_name, "key": wait.key, "rank": rank, "peer": peer}
            if self._send(processes[peer], ask):
                stall.asked[peer] = now
                asked += 1

    def _team_of(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        comm = self._comms.get(name) or self._meetings.get(name)
        return None if comm is None else (comm.team.rank, comm.team.processes)

    def _send(self, process: int, message: dict[str, Any]) -> bool:
        """Send a message over any comm that has a connection; return False where none has."""
        for comm in list(self._comms.values()):
            if process in comm.team.processes:
                peer = comm.team.processes.index(process)
                if peer != comm.team.rank and comm.send(peer, message):
                    return True
        return False

    def take(self, comm: AnsweringDetector, sender: int, message: dict[str, Any]) -> None:
        """Handle a message about waits."""
        process = comm.team.processes[sender]
        if "ask" in message:
            comm.send(sender, self._answer(message))
        elif "answer" in message:
            self._hear_answer(process, message)
        elif "ring" in message:
            self._conclude(message["comm"], FailureRecord(**message["ring"]))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        name, key = message["comm"], _tuples(message["key"])
        comm = self._comms.get(name)
        thread = threading.main_thread().ident if comm is None else comm.thread
        stall = next((it for it in self._stalls.values() if it.thread == thread), None)
        blocked = None
        if stall is not None and WAITING.get(stall.thread) is stall.wait:
            blocked = stall.number
            self._note(stall)
        # Where there is no comm, it is being made here too, or was, or nobody has thought of it yet.
        came = name in self._begun if comm is None else comm.has_come(message["rank"], key)
        if stall is not None and WAITING.get(stall.thread) is not stall.wait:  # which has ended meanwhile
            blocked = stall = None
        return {
            "answer": message["ask"],
            "peer": message["peer"],
            "came": came,
            "place": _words(thread, stall),
            "wait": blocked,
            "facts": [[list(node), *vars(facts).values()] for node, facts in self._facts.items()],
        }

    def _hear_answer(self, process: int, message: dict[str, Any]) -> None:
        own = {(self._process(stall), stall.number) for stall in self._stalls.values()}
        for node, comm, rank, place, blocked_by, silent in message["facts"]:
            if tuple(node) not in own:
                self._facts[tuple(node)] = Facts(comm, rank, place, _tuples(blocked_by), _tuples(silent))
        stall = next((it for it in self._stalls.values() if it.number == message["answer"]), None)
        if stall is None:
            return
        peer = message["peer"]
        stall.asked.pop(peer, None)
        stall.heard[peer] = time.monotonic()
        stall.absent.pop(peer, None)
        stall.blocked_by.pop(peer, None)
        if message["came"]:
            stall.come.add(peer)
            return
        stall.absent[peer] = Absent(peer, message["place"])
        if message["wait"] is not None:
            stall.blocked_by[peer] = (process, message["wait"])

    def _process(self, stall: _Stall) -> int:
        team = self._team_of(stall.wait.comm_name)
        return -1 if team is None else team[1][team[0]]

    def _note(self, stall: _Stall) -> Node:
        """Write down what this process knows of its own wait."""
        node = (self._process(stall), stall.number)
        rank, processes = self._team_of(stall.wait.comm_name) or (-1, ())
        now = time.monotonic()
        silent = [(peer, now - since) for peer, since in stall.asked.items() if now - since > _LONG_S]
        self._facts[node] = Facts(
            stall.wait.comm_name,
            rank,
            place_of(stall.thread),
            tuple(stall.blocked_by.values()),
            tuple((processes[peer], seconds) for peer, seconds in silent if processes),
        )
        return node

    def _find_leaver(self, stall: _Stall) -> None:
        comm = self._comms.get(stall.wait.comm_name)
        meeting = self._meetings.get(stall.wait.comm_name)
        for peer in stall.wait.needs:
            if comm is not None and comm.left_without(peer, stall.wait.key):
                comm.hear(FailureRecord(peer, "left", doing_now(stall.thread)))
            elif meeting is not None and (how := self.gone.get(meeting.team.processes[peer])) is not None:
                meeting.hear(FailureRecord(peer, how, doing_now(stall.thread)))

    def _find_ring(self, stall: _Stall) -> None:
        start = self._note(stall)
        ring = self._way_back(start)
        if not ring:
            return
        comm = self._comms.get(stall.wait.comm_name)
        if comm is not None and comm.leavers:  # one that has left is in no ring, but may have broken one
            comm.hear(FailureRecord(min(comm.leavers), "left", doing_now(stall.thread)))
            return
        facts = [(node[0], self._facts[node]) for node in ring]
        links = sorted(zip(facts, facts[1:] + facts[:1], strict=True), key=lambda link: link[0][0])
        places = "; ".join(
            f"rank {one.rank} is in {one.place} and waits for rank {to.rank}" for (_, one), (_, to) in links
        )
        first = min(it.rank for _, it in facts)
        record = FailureRecord(first, "deadlock", summary=places, ring=tuple(one for one, _ in facts))
        # All ranks of these comms hear of it; this one, which may leave because of it, the last.
        hearers = {(process, it.comm) for process, it in facts}
        hearers |= {(one, name) for _, name in hearers for one in (self._team_of(name) or (-1, ()))[1]}
        for process, name in sorted(hearers, key=lambda hearer: hearer[0] == start[0]):
            if process == start[0]:
                self._conclude(name, record)
            else:
                self._send(process, {"ring": vars(record), "comm": name})

    def _conclude(self, name: str, record: FailureRecord) -> None:
        place = self._comms.get(name) or self._meetings.get(name)
        if place is not None:
            place.hear(record)

    def _way_back(self, start: Node) -> list[Node]:
        """Return a ring of waits through ``start``; empty where there is none. None of them can have ended
        since it was heard of: each needs the next one.
        """
        came_from: dict[Node, Node] = {}
        ahead = [start]
        for node in ahead:
            facts = self._facts.get(node)
            for other in () if facts is None else facts.blocked_by:
                if other == start:
                    path = [node]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                if other not in came_from:
                    came_from[other] = node
                    ahead.append(other)
        return []

    def forget(self) -> None:
        """Forget all in a forked child."""
        self.__init__()  # type: ignore[misc]


def _words(thread: int | None, stall: _Stall | None) -> str:
    place = "another thread" if thread is None else place_of(thread)
    if stall is None:
        return place
    ranks = [str(rank) for rank in stall.wait.needs]
    return f"{place}, where it waits for rank{'s' if len(ranks) != 1 else ''} {', '.join(ranks)}"


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, (list, tuple)) else value


STALLS = _Stalls()
os.register_at_fork(after_in_child=STALLS.forget)
