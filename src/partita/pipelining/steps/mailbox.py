"""What waits for a pass on this rank, and what waits to be sent.

What a pass makes is put, once, where each of its users will look for it: straight into the inbox of a pass on
this rank, or into the outbox of a SEND. Nothing is kept once everybody has got it, so memory follows what is
in flight::

    0F0  ->  inbox of 1F0 (this rank)
         ->  outbox of 0SEND_F0>3   -- (network) --   room made by 3RECV_F0>0  ->  inbox of 3F0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from partita.pipelining.interface.layout import laid_out
from partita.runtime import Handle, wait_all

__all__ = ["Delivery", "Inbox", "Outbox"]

Outbox = dict[str, Any]
"""By name."""


class Inbox:
    """For one pass of one stage on one microbatch.

    Attributes:
        values: by name, from passes on this rank.
        messages: from other ranks, still being received: the names, the trailer, the data (see ``layout``).
        handles: what must be waited for before ``messages`` may be read.
    """

    __slots__ = ("handles", "messages", "values")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.messages: list[tuple[Sequence[str], Tensor, Sequence[Tensor]]] = []
        self.handles: list[Handle] = []

    def wait(self) -> None:
        """Until all of it is here."""
        wait_all(self.handles)
        self.handles.clear()

    def take(self) -> dict[str, Any]:
        """All of it, once it is here."""
        if self.handles:
            self.wait()
        values, self.values = self.values, {}
        for names, trailer, data in self.messages:
            for name, value in zip(names, laid_out(trailer, data), strict=True):
                if value is not None:
                    values[name] = value
        self.messages.clear()
        return values

    def clear(self) -> None:
        """Drop what is left after a failure."""
        self.values, self.messages, self.handles = {}, [], []


class Delivery:
    """Where the results of one pass go.

    Args:
        targets: by name, the inboxes (their values are looked up late, since each step has new ones) and the
            outboxes.
    """

    __slots__ = ("_targets",)

    def __init__(self, targets: Mapping[str, tuple[Sequence[Inbox], Sequence[Outbox]]]) -> None:
        self._targets = tuple((name, tuple(inner), tuple(outer)) for name, (inner, outer) in targets.items())

    def put(self, made: Mapping[str, Tensor | None]) -> None:
        """Hand on what was made; None for a gradient that is not there."""
        for name, inboxes, outboxes in self._targets:
            value = made[name]
            if value is None:
                continue
            value = value.detach()
            for inbox in inboxes:
                inbox.values[name] = value
            for outbox in outboxes:
                outbox[name] = value
