"""Which gradients of a backward pass lie in one memory: a sum hands on the one that it is sent, to all of its
inputs, and a concatenation slices of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import PlanError
from partita.planning._check import require_amount, require_count
from partita.planning.costs.spanning import SpanningValue

__all__ = ["CrossingGradient", "GradientMemory", "SharedGradient"]


@dataclass(frozen=True)
class CrossingGradient:
    """The gradient of a value that crosses borders.

    Attributes:
        bytes: of the gradient, for one microbatch.
        spanning: the number of the value in `CostModel.spanning`; None for one that is made right before a
            border and used right behind it alone.
        direct: of those that one border has, its number.

    Raises:
        PlanError: a negative number.
    """

    bytes: int
    spanning: int | None = None
    direct: int = 0

    def __post_init__(self) -> None:
        require_amount(self.bytes, "bytes of a crossing gradient")
        require_amount(self.direct, "direct of a crossing gradient")
        if self.spanning is not None:
            require_amount(self.spanning, "spanning of a crossing gradient")


@dataclass(frozen=True)
class SharedGradient:
    """Gradients that lie in one memory, as the backward pass of a unit returns them.

    Attributes:
        unit: the number of the unit.
        bytes: of the memory, which may be larger than that of all of them.
        inputs: those that it returns.
        output: the one that it is sent and returns as it came; None: the unit has made the memory.

    Raises:
        PlanError: no gradients, or a negative number.
    """

    unit: int
    bytes: int
    inputs: tuple[CrossingGradient, ...]
    output: CrossingGradient | None = None

    def __post_init__(self) -> None:
        require_amount(self.unit, "the unit of a shared gradient")
        require_amount(self.bytes, "bytes of a shared gradient")
        require_count(len(self.inputs), "the number of inputs of a shared gradient")


_Place = tuple[str, int, int]
"""Names a memory: what it is, and two numbers."""


class GradientMemory:
    """The gradients that are alive in the backward pass of a stage.

    Args:
        across: for each border, the spanning values that cross it.
        spanning: see `CostModel`.
        shared: see `CostModel.shared_gradients`.

    Raises:
        PlanError: a spanning value that there is not.
    """

    def __init__(
        self,
        across: Sequence[Sequence[SpanningValue]],
        spanning: Sequence[SpanningValue],
        shared: Sequence[SharedGradient],
    ) -> None:
        self._across, self._spanning = across, spanning
        self._numbers = {id(value): number for number, value in enumerate(spanning)}
        self._past: dict[tuple[int, int], int] = {}
        # By the unit that returns it: the group of each; and what each unit is sent that others share.
        self._groups: dict[tuple[int, int | None, int], tuple[int, SharedGradient]] = {}
        self._by_maker: dict[int, list[CrossingGradient]] = {}
        for group, it in enumerate(shared):
            for gradient in (*it.inputs, *(() if it.output is None else (it.output,))):
                if gradient.spanning is not None and gradient.spanning >= len(spanning):
                    raise PlanError(
                        f"a shared gradient is that of spanning value {gradient.spanning}: there are "
                        f"{len(spanning)}"
                    )
            for gradient in it.inputs:
                self._groups[it.unit, gradient.spanning, gradient.direct] = group, it
                if gradient.spanning is None:
                    self._by_maker.setdefault(it.unit - 1, []).append(gradient)

    def past(self, unit: int, last: int) -> int:
        """In B of a stage that ends with `last`, the bytes that are there beside those of `unit` and those
        that later stages have sent: of what goes past it, as far as units behind it have computed some; less
        those that the unit is said to need and that are counted already.
        """
        size = self._past.get((unit, last))
        if size is None:
            size = self._past[unit, last] = self._computed_past(unit, last)
        return size

    def _computed_past(self, unit: int, last: int) -> int:
        size, places = 0, dict[_Place, int]()
        for it in self._across[unit] if unit < len(self._across) else ():
            if it.is_used_in(unit + 1, last):
                gradient = CrossingGradient(it.gradient_bytes, self._numbers[id(it)])
                place, memory = self._place(gradient, unit, last)
                places[place] = max(places.get(place, 0), memory)
            if it.maker == unit:
                size -= it.gradient_bytes  # the unit is said to need it
        for gradient in self._by_maker.get(unit, ()) if unit < last else ():
            place, memory = self._place(gradient, unit, last)
            places[place] = max(places.get(place, 0), memory)
            size -= gradient.bytes
        return size + sum(places.values())

    def added(self, unit: int, last: int) -> int:
        """Where sums begin with what `unit` returns, of values that go past units: it and the sums, which are
        there beside what was sent to the stage, to which nothing is added in place; else 0.
        """
        returned = sums = 0
        for it in self._across[unit - 1] if unit else ():
            if it.is_used_in(unit, unit):
                returned += it.gradient_bytes
                if it.last > unit:
                    place, _ = self._place(CrossingGradient(0, self._numbers[id(it)]), unit, last)
                    sums += it.gradient_bytes if place[0] == "sent" else 0
        return returned + sums if sums else 0

    def _place(self, gradient: CrossingGradient, unit: int, last: int) -> tuple[_Place, int]:
        """The memory of the gradient of a value that `unit` or one in front makes, when all units behind
        it have run; and its bytes, 0 of what was sent to the stage, which is counted with the messages.
        """
        if gradient.spanning is None:
            if unit == last:
                return ("sent", unit, -1 - gradient.direct), 0
            user = unit + 1
        else:
            value = self._spanning[gradient.spanning]
            users = [it for it in value.users if unit < it <= last]
            if not users:
                return ("sent", gradient.spanning, 0), 0
            if value.last > last or len(users) > 1:
                return ("sum", gradient.spanning, 0), gradient.bytes
            user = users[0]
        shared = self._groups.get((user, gradient.spanning, gradient.direct))
        if shared is None:
            return ("own", unit if gradient.spanning is None else -1 - gradient.spanning, gradient.direct), (
                gradient.bytes
            )
        group, it = shared
        if it.output is not None:
            return self._place(it.output, user, last)
        return ("group", group, 0), it.bytes
