"""What lies on the ranks of rows beside their passes: of messages, and between stages of one rank."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from partita.planning.searching.orders.row_memory import RowKinds
from partita.planning.simulating.message_sizes import Handed, MessageSizes, handed_beside
from partita.planning.simulating.messages import PlacedPass, RankMessages

__all__ = ["Beside", "RowsInMemory"]


class RowsInMemory(NamedTuple):
    """What rows hold, apart from costs.

    Attributes:
        placed: for each rank its passes, with microbatches in place of numbers.
        kinds: for each rank, what its peak depends on.
        messages: for each rank, what lies there for messages.
    """

    placed: list[list[PlacedPass]]
    kinds: list[RowKinds]
    messages: list[RankMessages]


class Beside(NamedTuple):
    """What lies on ranks beside their passes.

    Attributes:
        of_rows: when it does.
        sizes: of each message.
        handed: for each rank, what its stages hand to each other.
    """

    of_rows: RowsInMemory
    sizes: MessageSizes
    handed: list[list[Handed]]

    def key_of(self, rank: int) -> tuple[object, ...]:
        """All that `bytes_on` depends on, besides the rows."""
        messages, sizes = self.of_rows.messages[rank], self.sizes
        coming = map(sizes.coming.__getitem__, messages.coming)
        return (*coming, None, *map(sizes.sent.__getitem__, messages.sent), tuple(self.handed[rank]))

    def bytes_on(self, rank: int) -> list[int]:
        """For each pass of a rank, the bytes beside it."""
        placed, handed = self.of_rows.placed[rank], self.handed[rank]
        beside = self.sizes.beside(self.of_rows.messages[rank], len(placed))
        if not handed:
            return beside
        waiting = handed_beside(placed, handed if self.of_rows.kinds[rank].trains else ())
        return list(map(add, beside, waiting))
