"""A value that goes past units, such as a skip connection; and what stages of one rank hand to each other."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from partita.errors import PlanError
from partita.planning._check import require_amount

__all__ = ["NOTHING_SHARED", "Messages", "SharedOnRank", "SpanningValue", "SpanningView"]


@dataclass(frozen=True)
class SpanningView:
    """What is sent of the memory of a value: the whole of it, or, of a view, what the view shows.

    Attributes:
        bytes: of the view, for one microbatch.
        gradient_bytes: of its gradient; 0 where it has none.
        maker: the unit that makes the view.
        last: the last unit that is given it.

    Raises:
        PlanError: a negative number of bytes.
    """

    bytes: int
    gradient_bytes: int
    maker: int
    last: int

    def __post_init__(self) -> None:
        require_amount(self.bytes, "bytes of a view")
        require_amount(self.gradient_bytes, "gradient_bytes of a view")

    def crosses(self, border: int) -> bool:
        """Whether it is made in front of the border and used behind it."""
        return self.maker <= border < self.last


@dataclass(frozen=True)
class SpanningValue:
    """A value that goes past a unit: made in front of it, and used behind it, such as a skip connection.

    Attributes:
        bytes: of the value's memory, for one microbatch.
        gradient_bytes: of its gradient; 0 where it has none.
        maker: the unit that makes it; -1 for an input of the model.
        users: the units that are given it, in order.
        keeper: the first unit whose backward pass needs it; None: no unit's.
        views: what is sent of it, where that is not the whole of its memory; None where it is.

    Raises:
        PlanError: users out of order, or a negative number of bytes.
    """

    bytes: int
    gradient_bytes: int
    maker: int
    users: tuple[int, ...]
    keeper: int | None = None
    views: tuple[SpanningView, ...] | None = None

    def __post_init__(self) -> None:
        require_amount(self.bytes, "bytes of a spanning value")
        require_amount(self.gradient_bytes, "gradient_bytes of a spanning value")
        places = (self.maker, *self.users)
        if self.maker < -1 or len(places) < 2 or any(one >= two for one, two in pairwise(places)):
            raise PlanError(
                f"a spanning value is made by unit {self.maker} and used by {self.users}: give its users in "
                "order, all behind its maker, which is -1 for an input of the model"
            )

    @property
    def last(self) -> int:
        """The last unit that is given it."""
        return self.users[-1]

    def is_used_in(self, first: int, last: int) -> bool:
        """Whether one of the units from `first` to `last` is given it."""
        place = bisect_left(self.users, first)  # some are given to every block
        return place < len(self.users) and self.users[place] <= last

    @cached_property
    def parts(self) -> tuple[SpanningView, ...]:
        """What is sent of it: its views, or the whole of it."""
        if self.views is None:
            return (SpanningView(self.bytes, self.gradient_bytes, self.maker, self.last),)
        return self.views

    def sent_bytes(self, border: int) -> int:
        """What of it crosses a border between its maker and its last user."""
        return sum(view.bytes for view in self.parts if view.crosses(border))

    def sent_gradient_bytes(self, border: int) -> int:
        """What of its gradient crosses back."""
        return sum(view.gradient_bytes for view in self.parts if view.crosses(border))

    def holder_before(self, unit: int, view: SpanningView) -> int:
        """The last unit in front of this one that has the view: a user, or the one that makes it."""
        place = bisect_left(self.users, unit)
        return max(view.maker, self.users[place - 1] if place else view.maker)


class SharedOnRank(NamedTuple):
    """What a stage and other stages on its rank hand to each other, for one microbatch. It is in memory once,
    and no message. And whom it hands values and gradients to.

    Attributes:
        entering_bytes: of what the stage is given, what an earlier stage of the rank has made.
        sent_gradient_bytes: of the gradients that it hands back, those that go to the rank's other stages.
        received_gradient_bytes: of the gradients that it is handed, those that come from them.
        sent_tied_bytes: of the gradients of tied parameters that it hands on, those that stay on the rank.
        handed_gradients: see `StageCost`.
        sent_values: see `StageCost`.
    """

    entering_bytes: int = 0
    sent_gradient_bytes: int = 0
    received_gradient_bytes: int = 0
    sent_tied_bytes: int = 0
    handed_gradients: tuple[tuple[int, int], ...] = ()
    sent_values: tuple[tuple[int, int], ...] | None = None


NOTHING_SHARED = SharedOnRank()


class Messages(NamedTuple):
    """The bytes that a stage is sent by other ranks, that it sends back, and that it is sent back, for one
    microbatch.
    """

    entering: int
    sent_back: int
    received_back: int
