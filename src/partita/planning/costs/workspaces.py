"""What the passes of a stage need at most while they run, beyond what it keeps, worked out from its units."""

from __future__ import annotations

from dataclasses import dataclass

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.tied_gradients import tied_gradients
from partita.planning.costs.units import Unit

__all__ = ["WEIGHTS_TOGETHER_BYTES", "half_workspaces", "workspaces"]

WEIGHTS_TOGETHER_BYTES = 2**20
"""How large the gradients are that W computes at a time, where one of them alone is not larger."""


def workspaces(costs: CostModel, first: int, last: int) -> tuple[int, int]:
    """What F and B of a stage of the units from `first` to `last` need at most beyond what it keeps, in
    bytes. While a unit runs, what the units behind it keep is not there yet, or no longer.

    >>> from partita.planning import Unit
    >>> units = (Unit("a", 1.0, 2.0, activation_bytes=5, backward_workspace_bytes=9),
    ...          Unit("b", 1.0, 2.0, activation_bytes=4, backward_workspace_bytes=6))
    >>> workspaces(CostModel(units, (1,)), 0, 1)
    (0, 6)
    """
    stage = _Stage(costs, first, last)
    behind = forward = backward = 0
    for number in range(last, first - 1, -1):
        unit = costs.units[number]
        to_come = behind + (stage.sent_behind(number) if number < last else 0)
        forward = max(forward, unit.forward_workspace_bytes + stage.values_beside(number) - to_come)
        freed = behind - (stage.returned_behind(number) if number < last else 0)
        needed = unit.backward_workspace_bytes + (unit.copied_gradient_bytes if number == first else 0)
        backward = max(backward, needed + stage.gradients_beside(number) - freed)
        behind += unit.activation_bytes
        backward = max(backward, stage.gradients_after(number) - freed - unit.activation_bytes)
    return forward, backward


def half_workspaces(costs: CostModel, first: int, last: int) -> tuple[int, int] | None:
    """What I and W of a stage of the units from `first` to `last` need at most, in bytes beyond what is
    there when they start; None where a unit has none. What I of the units behind has caught is there, and
    what W of them had is not, but for units with small parameters: their gradients are computed together.

    >>> from partita.planning import Unit
    >>> units = tuple(
    ...     Unit(name, 1.0, 2.0, activation_bytes=5, weight_activation_bytes=7, input_workspace_bytes=4,
    ...          weight_workspace_bytes=9) for name in "ab")
    >>> half_workspaces(CostModel(units, (1,)), 0, 1)
    (6, 9)
    """
    stage = _Stage(costs, first, last)
    late, left = costs.only_in_w(first, last), costs.left_by_units(first, last)
    caught = done = inputs = weights = 0
    together = _Together()
    for number in range(last, first - 1, -1):
        unit = costs.units[number]
        if unit.input_workspace_bytes is None or unit.weight_workspace_bytes is None:
            return None
        if number in late:
            continue
        # What the last unit has caught of what was sent to the stage is there once.
        twice = costs.units[last].caught_bytes if number < last else 0
        gradients = max(stage.gradients_beside(number) - twice, 0)
        inputs = max(inputs, unit.input_workspace_bytes + caught + gradients)
        if unit.parameter_bytes > WEIGHTS_TOGETHER_BYTES:
            weights = max(weights, unit.weight_workspace_bytes - done)
            done += left[number - first]
        else:
            if not together.has_room(unit):
                done += together.left
                together = _Together()
            weights = max(weights, together.gradients + unit.weight_workspace_bytes - done)
            together.add(unit, left[number - first])
        caught += left[number - first] - unit.activation_bytes
        inputs = max(inputs, stage.gradients_after(number) - twice + caught)
        if number == last == len(costs.units) - 1:
            caught += stage.returned
    done += together.left
    # The others run last, as in B; what they were sent was there before.
    done += stage.received + costs.gradients_for_w(late, first, last)[1]
    for number in sorted(late, reverse=True):
        unit = costs.units[number]
        weights = max(weights, unit.backward_workspace_bytes + stage.gradients_beside(number) - done)
        done += unit.activation_bytes
        weights = max(weights, stage.gradients_after(number) - done)
    return inputs, weights


@dataclass(slots=True)
class _Together:
    """Units whose weights' gradients are computed together: what is left to each of them is there until the
    last one is done.

    Attributes:
        gradients: bytes.
        left: what I has left to their W.
    """

    gradients: int = 0
    left: int = 0

    def has_room(self, unit: Unit) -> bool:
        return self.gradients + unit.parameter_bytes <= WEIGHTS_TOGETHER_BYTES

    def add(self, unit: Unit, left: int) -> None:
        self.gradients += min(unit.parameter_bytes, unit.weight_workspace_bytes or 0)
        self.left += left


class _Stage:
    """What is alive in a stage of the units from `first` to `last`, beside what a unit is said to need.

    Attributes:
        returned: of what the stage returns, what its units keep; it is there until B is over.
        received: the gradients that later stages send.
    """

    def __init__(self, costs: CostModel, first: int, last: int) -> None:
        self._costs, self._first, self._last = costs, first, last
        across = costs.across[last] if last + 1 < len(costs.units) else ()
        self.returned = 0 if costs.returned_bytes is None else costs.returned_bytes[last]
        self._sent = 0 if costs.exit_bytes is None or last + 1 == len(costs.units) else costs.exit_bytes[last]
        own = [it for it in across if it.maker >= 0]
        self._in_front = [(it.keeper, it.bytes) for it in own if it.keeper is not None]
        self._sent_in_front = [(it.maker, it.bytes) for it in own if it.keeper is None or it.keeper > last]
        self.received = 0 if costs.entry_bytes is None else costs.received_gradient_bytes(first, last)
        self.received += tied_gradients(costs, first, last).received
        self._tied = [
            (it, it.used_in(first, last))
            for it in costs.tied
            if it.is_sent(first, last) or it.is_received(first, last)
        ]
        # gradients that it is sent of what its last unit makes and the one behind that alone is given
        self._of_last = 0
        if last + 1 < len(costs.units):
            spanning = sum(it.sent_gradient_bytes(last) for it in across)
            self._of_last = max(costs.gradient_bytes[last] - spanning, 0)

    def returned_behind(self, unit: int) -> int:
        """Of these, what the units behind `unit` keep."""
        return (
            self.returned - sum(size for keeper, size in self._in_front if keeper <= unit)
            if self.returned
            else 0
        )

    def sent_behind(self, unit: int) -> int:
        """Of what the stage holds on to only since it has sent it, what the units behind `unit` make."""
        return (
            self._sent - sum(size for maker, size in self._sent_in_front if maker <= unit)
            if self._sent
            else 0
        )

    def values_beside(self, unit: int) -> int:
        """In F: the values that nobody keeps yet, or ever; also those that the unit makes."""
        costs, first, last = self._costs, self._first, self._last
        values = costs.passing_bytes[unit - 1] if costs.passing_bytes is not None and unit > first else 0
        own = costs.exit_bytes[unit] if costs.exit_bytes is not None and unit < last else 0
        for it in costs.across[unit] if unit + 1 < len(costs.units) else ():
            if it.maker < 0 or (it.keeper is not None and it.keeper <= unit):
                continue
            if it.maker != unit:
                own -= it.bytes
                values += it.bytes if it.maker >= first and it.last <= last else 0
            elif it.last > last and (it.keeper is None or it.keeper > last):
                own -= it.bytes  # the stage is said to hold on to it
        return values + max(own, 0)

    def gradients_beside(self, unit: int) -> int:
        """In B: those that units behind it have computed, and all that later stages have sent, which are
        there until B is over.
        """
        gradients = self.received - (self._of_last if unit == self._last else 0)
        gradients += self._costs.gradient_memory.past(unit, self._last)
        # Of tied parameters: the share of a unit behind, which goes to an earlier stage when B is over; and
        # in a unit that has one, its sum with what was there.
        for tied, used in self._tied:
            is_sent = used[0] > tied.units[0] and used[-1] > unit
            is_summed = unit in used and (used[-1] > unit or used[-1] < tied.units[-1])
            gradients += tied.gradient_bytes * (is_sent + is_summed)
        return max(gradients, 0)

    def gradients_after(self, unit: int) -> int:
        """In B: when the unit has run, and let go of what it kept, and sums are made of what it returns."""
        added = self._costs.gradient_memory.added(unit, self._last)
        if not added:
            return 0  # no more than while it ran
        direct = self._costs.direct_gradient_bytes[unit - 1]
        return self.gradients_beside(unit) + direct + added
