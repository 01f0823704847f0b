"""Values on their way: inboxes of passes on this rank, and outboxes of messages.

The outputs of a pass are put where each of their users takes them from: into the inbox of a pass on this
rank, or into the outbox of a SEND. They are dropped when the last user has taken them::

    0F0  ->  inbox of 1F0 (this rank)
         ->  outbox of 0SEND_F0>3   -- (network) --   memory of 3RECV_F0>0  ->  inbox of 3F0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from partita.pipelining.interface.layout import laid_out
from partita.runtime import Handle, wait_all

__all__ = ["Delivery", "Inbox", "Outbox"]

Outbox = dict[str, Any]
"""Values to be sent, by name."""


class Inbox:
    """The inputs of one pass of one stage on one microbatch.

    Attributes:
        values: those from passes on this rank, by name.
        messages: those from other ranks, being received: the names, the trailer, the data (see ``layout``).
        handles: what must be waited for before ``messages`` may be read.
    """

    __slots__ = ("handles", "messages", "values")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.messages: list[tuple[Sequence[str], Tensor, Sequence[Tensor]]] = []
        self.handles: list[Handle] = []

    def wait(self) -> None:
        """Wait until all messages are here."""
        wait_all(self.handles)
        self.handles.clear()

    def take(self) -> dict[str, Any]:
        """Wait, and return all inputs by name; the inbox is empty then."""
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
        """Drop everything, after a failure."""
        self.values, self.messages, self.handles = {}, [], []


class Delivery:
    """Where the results of one pass go.

    Args:
        targets: the inboxes and the outboxes of each value, by its name.
    """

    __slots__ = ("_targets",)

    def __init__(self, targets: Mapping[str, tuple[Sequence[Inbox], Sequence[Outbox]]]) -> None:
        self._targets = tuple((name, tuple(inner), tuple(outer)) for name, (inner, outer) in targets.items())

    def put(self, values: Mapping[str, Tensor | None]) -> None:
        """Deliver the results; None stands for a gradient that does not exist."""
        for name, inboxes, outboxes in self._targets:
            value = values[name]
            if value is None:
                continue
            value = value.detach()
            for inbox in inboxes:
                inbox.values[name] = value
            for outbox in outboxes:
                outbox[name] = value
