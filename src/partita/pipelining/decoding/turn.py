"""The messages of a ring of stages: one call's way from the last stage over the first to the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from partita.pipelining.blocks.packet import Packet
from partita.pipelining.blocks.staying_state import StateChange

__all__ = ["Turn"]


@dataclass(frozen=True, eq=False)
class Turn:
    """A call of a program as it goes from stage to stage.

    Attributes:
        program: the number of the program.
        packet: what the next stage is handed; None: nothing is called, the message only tells.
        opened: with the first call of a program, its staying objects; None later.
        before: what each stage has changed in the staying objects in the call before.
        changes: what each stage has changed in this call so far.
        report: see `ModelCall`.
        ended: programs that are over, whose staying objects are dropped.
        last: nothing follows.
    """

    program: int
    packet: Packet | None
    opened: bytes | None = None
    before: Mapping[int, tuple[StateChange, ...]] = field(default_factory=dict)
    changes: Mapping[int, tuple[StateChange, ...]] = field(default_factory=dict)
    report: Any = None
    ended: tuple[int, ...] = ()
    last: bool = False

    @property
    def values(self) -> Mapping[int, Tensor]:
        """The tensors of the packet, which are sent after the rest."""
        return {} if self.packet is None else self.packet.values

    def with_values(self, values: Mapping[int, Tensor]) -> Turn:
        """Return a copy with other tensors."""
        return self if self.packet is None else replace(self, packet=self.packet.with_values(values))

    def handed_on(self, stage: int, packet: Packet, changes: tuple[StateChange, ...]) -> Turn:
        """Return what goes to the next stage."""
        return replace(self, packet=packet, changes={**self.changes, stage: changes})
