"""What a model costs: its units, and the bytes alive between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import require_amount, require_count
from partita.planning.costs.costed_for import CostedFor
from partita.planning.costs.gradient_memory import GradientMemory, SharedGradient
from partita.planning.costs.spanning import NOTHING_SHARED, Messages, SharedOnRank, SpanningValue
from partita.planning.costs.units import TiedUnits, Unit

__all__ = ["CostModel"]


@dataclass(frozen=True)
class CostModel:
    """The units of a model in execution order, and what crosses each border between two neighbours.

    Border `i` lies between unit `i` and unit `i + 1`.

    Attributes:
        units: in execution order.
        crossing_bytes: one number a border: bytes that a forward pass carries across it for one microbatch.
        crossing_grad_bytes: the same for the backward pass; None where the gradients are as large as the
            values.
        borders: the borders at which a cut is allowed; None where all are.
        entry_bytes: one number a border: of what crosses it, what the stage after it keeps for its backward
            pass beyond the `Unit.activation_bytes` of its units; None where that is nothing.
        exit_bytes: the same for the stage before the border.
        entry_left_bytes: of `entry_bytes`, what I of the stage after the border leaves to W; None where that
            is not known: all of it, and of `exit_bytes`.
        passing_bytes: one number a border: of what crosses it, what no unit keeps and none but the one behind
            it is given; it is there until that unit has run. None where that is nothing.
        returned_bytes: one number a unit: of what a stage that ends with it returns, what its units keep; it
            is there until B or I is over. None where that is nothing.
        spanning: the values that go past units. Of what crosses a border, a stage is sent, keeps and sends
            on only what it makes or uses itself; the rest goes past it, from its maker to its users.
        shared_gradients: those of what crosses borders that lie in one memory.
        tied: parameters that several units count as their own.
        costed_for: the device that seconds were worked out for; None where they were measured or made up.

    Raises:
        PlanError: no units, a name used twice, or a length, a border or tied parameters that don't fit the
        units.

    >>> costs = CostModel((Unit("embed", 1.0, 2.0), Unit("block", 3.0, 6.0)), crossing_bytes=(1024,))
    >>> CostModel.from_json(costs.to_json()) == costs
    True
    """

    units: tuple[Unit, ...]
    crossing_bytes: tuple[int, ...]
    crossing_grad_bytes: tuple[int, ...] | None = None
    borders: frozenset[int] | None = None
    entry_bytes: tuple[int, ...] | None = None
    exit_bytes: tuple[int, ...] | None = None
    entry_left_bytes: tuple[int, ...] | None = None
    passing_bytes: tuple[int, ...] | None = None
    returned_bytes: tuple[int, ...] | None = None
    spanning: tuple[SpanningValue, ...] = ()
    tied: tuple[TiedUnits, ...] = ()
    costed_for: CostedFor | None = None
    shared_gradients: tuple[SharedGradient, ...] = ()

    def __post_init__(self) -> None:
        require_count(len(self.units), "the number of units")
        # Each unit is known by its name.
        seen: set[str] = set()
        for unit in self.units:
            if unit.name in seen:
                raise PlanError(f"two units are named {unit.name!r}: give each its own name")
            seen.add(unit.name)
        # A number for each border, or for each unit.
        between = len(self.units) - 1
        for what in (
            "crossing_bytes",
            "crossing_grad_bytes",
            "entry_bytes",
            "exit_bytes",
            "entry_left_bytes",
            "passing_bytes",
            "returned_bytes",
        ):
            sizes = getattr(self, what)
            if sizes is None:
                continue
            count = between + (what == "returned_bytes")
            if len(sizes) != count:
                raise PlanError(f"{what} has {len(sizes)} numbers for {len(self.units)} units: give {count}")
            for index, size in enumerate(sizes):
                require_amount(size, f"{what}[{index}]")
        # What refers to units and borders by number.
        for border in self.borders or ():
            if not 0 <= border < between:
                raise PlanError(
                    f"border {border!r} does not exist: {len(self.units)} units have borders 0 to "
                    f"{between - 1}"
                )
        for value in self.spanning:
            if value.last > between:
                raise PlanError(
                    f"a spanning value is used by unit {value.last}: there are units 0 to {between}"
                )
        for tied in self.tied:
            least = min(self.units[unit].parameter_bytes if unit <= between else -1 for unit in tied.units)
            if tied.parameter_bytes > least:
                raise PlanError(
                    f"tied parameters of {tied.parameter_bytes} bytes are in the units {tied.units}, of "
                    "which one does not exist or has fewer bytes: give units that count them as their own"
                )

    @cached_property
    def across(self) -> tuple[tuple[SpanningValue, ...], ...]:
        """For each border, the spanning values that cross it; whatever else does is made right before it, and
        used right behind.
        """
        across: list[list[SpanningValue]] = [[] for _ in self.crossing_bytes]
        for value in self.spanning:
            for border in range(max(value.maker, 0), value.last):
                across[border].append(value)
        return tuple(map(tuple, across))

    def _past_stage(self, first: int, last: int) -> list[SpanningValue]:
        """The values that a stage of the units from `first` to `last` has nothing to do with, though they
        cross both of its borders. The first stage sends the model's inputs on, whoever uses them.
        """
        if not first:
            return []
        across = self.across[first - 1]
        return [it for it in across if it.last > last and not it.is_used_in(first, last)]

    def parameter_bytes(self, first: int, last: int) -> int:
        """The parameters of a stage of the units from `first` to `last`, in bytes; what is tied counts once.

        >>> units = tuple(Unit(name, 1.0, 2.0, parameter_bytes=8) for name in "abc")
        >>> costs = CostModel(units, (4, 4), tied=(TiedUnits((0, 2), parameter_bytes=8),))
        >>> costs.parameter_bytes(0, 2), costs.parameter_bytes(0, 1)
        (16, 16)
        """
        size = sum(unit.parameter_bytes for unit in self.units[first : last + 1])
        return size - sum(tied.parameter_bytes * tied.repeats(first, last) for tied in self.tied)

    def parameters(self, first: int, last: int) -> int:
        """How many numbers the parameters of a stage of the units from `first` to `last` hold."""
        count = sum(unit.parameters for unit in self.units[first : last + 1])
        return count - sum(tied.parameters * tied.repeats(first, last) for tied in self.tied)

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """One number a border: bytes that the backward pass of one microbatch carries across it."""
        return self.crossing_bytes if self.crossing_grad_bytes is None else self.crossing_grad_bytes

    @property
    def allowed_borders(self) -> tuple[int, ...]:
        """The borders at which a cut is allowed, in order."""
        return tuple(range(len(self.units) - 1)) if self.borders is None else tuple(sorted(self.borders))

    def kept_bytes(self, first: int, last: int) -> int:
        """What a stage of the units from `first` to `last` keeps from F to B, in bytes of one microbatch.

        >>> units = tuple(Unit(name, 1.0, 2.0, activation_bytes=10) for name in "abc")
        >>> CostModel(units, (4, 4), entry_bytes=(4, 0), exit_bytes=(0, 4)).kept_bytes(1, 1)
        18
        """
        kept = sum(unit.activation_bytes for unit in self.units[first : last + 1])
        if self.entry_bytes is not None and first:
            kept += self.entry_bytes[first - 1]
        if self.exit_bytes is not None and last + 1 < len(self.units):
            kept += self.exit_bytes[last]
        return kept - sum(self._counted_past(it, first, last) for it in self._past_stage(first, last))

    def _counted_past(self, value: SpanningValue, first: int, last: int) -> int:
        """What a value that goes past a stage adds to the entry and the exit at its borders."""
        entry = self.entry_bytes is not None and (value.keeper is None or value.keeper < first)
        leaves = self.exit_bytes is not None and value.maker >= 0
        return value.bytes * (entry + (leaves and (value.keeper is None or value.keeper > last)))

    def entering_bytes(self, first: int, last: int) -> int:
        """What a stage of the units from `first` to `last` is sent for one microbatch, in bytes."""
        if not first:
            return 0
        past = sum(it.sent_bytes(first - 1) for it in self._past_stage(first, last))
        return max(self.crossing_bytes[first - 1] - past, 0)

    def sent_bytes(self, first: int, last: int) -> int:
        """What it sends on."""
        if last + 1 == len(self.units):
            return 0
        past = sum(it.sent_bytes(last) for it in self._past_stage(first, last))
        return max(self.crossing_bytes[last] - past, 0)

    def sent_gradient_bytes(self, first: int, last: int) -> int:
        """What it sends back: the gradient of what it was sent."""
        if not first:
            return 0
        past = sum(it.sent_gradient_bytes(first - 1) for it in self._past_stage(first, last))
        return max(self.gradient_bytes[first - 1] - past, 0)

    def received_gradient_bytes(self, first: int, last: int) -> int:
        """What it is sent back."""
        if last + 1 == len(self.units):
            return 0
        past = sum(it.sent_gradient_bytes(last) for it in self._past_stage(first, last))
        return max(self.gradient_bytes[last] - past, 0)

    def left_bytes(self, first: int, last: int) -> int:
        """What I of a stage of the units from `first` to `last` leaves to W, in bytes of one microbatch."""
        units, late = range(first, last + 1), self.only_in_w(first, last)
        left = sum(self.left_by_units(first, last)) + sum(self.gradients_for_w(late, first, last))
        if self.entry_left_bytes is not None:
            return left + self._entry_left(first, last)
        return left + self.kept_bytes(first, last) - sum(self.units[unit].activation_bytes for unit in units)

    def left_by_units(self, first: int, last: int) -> list[int]:
        """What I leaves to W of each unit of a stage, in bytes. Nothing of the last ones
        that have no weights: no W behind them holds on to the graph that has it.

        >>> units = [Unit(name, 1.0, 2.0, activation_bytes=4, has_weights=name == "a") for name in "ab"]
        >>> CostModel(tuple(units), (4,)).left_by_units(0, 1)
        [4, 0]
        """
        late = self.only_in_w(first, last)
        left: list[int] = []
        is_held = False
        for number in range(last, first - 1, -1):
            unit = self.units[number]
            is_held |= unit.has_weights
            left.append(unit.activation_bytes if number in late else unit.weight_bytes if is_held else 0)
        return left[::-1]

    def _entry_left(self, first: int, last: int) -> int:
        """What of its entry a stage may leave to W: not of what goes past it."""
        if not first or self.entry_bytes is None or self.entry_left_bytes is None:
            return 0
        past = [it for it in self._past_stage(first, last) if it.keeper is None or it.keeper < first]
        kept = self.entry_bytes[first - 1] - sum(it.bytes for it in past)
        return min(self.entry_left_bytes[first - 1], max(kept, 0))

    def messages(self, first: int, last: int, shared: SharedOnRank = NOTHING_SHARED) -> Messages:
        """What a stage of the units from `first` to `last` is sent and sends back. Counted where it is known
        what crosses (`entry_bytes`).

        Args:
            shared: what is no message, since it stays on the rank.
        """
        if self.entry_bytes is None:
            return Messages(0, 0, 0)
        entering = self.entering_bytes(first, last) - shared.entering_bytes
        sent = self.sent_gradient_bytes(first, last) - shared.sent_gradient_bytes
        received = self.received_gradient_bytes(first, last) - shared.received_gradient_bytes
        return Messages(max(entering, 0), max(sent, 0), max(received, 0))

    def split_backward_s(self, first: int, last: int) -> tuple[float, float] | None:
        """Seconds of I and of W of a stage of the units from `first` to `last`; None where a unit has none.

        Where the model's inputs need no gradient, I of the first stage has nothing to do, and W does all.

        >>> units = (Unit("a", 1.0, 2.0, backward_input_s=0.0, backward_weight_s=2.0),
        ...          Unit("b", 1.0, 2.0, backward_input_s=1.5, backward_weight_s=1.0))
        >>> costs = CostModel(units, (4,))
        >>> costs.split_backward_s(0, 1), costs.split_backward_s(1, 1)
        ((0.0, 4.0), (1.5, 1.0))
        """
        units = self.units[first : last + 1]
        late = self.only_in_w(first, last)
        input_s = weight_s = 0.0
        for number, unit in enumerate(units, first):
            if unit.backward_input_s is None or unit.backward_weight_s is None:
                return None
            input_s += 0.0 if number in late else unit.backward_input_s
            weight_s += unit.backward_s if number in late else unit.backward_weight_s
        return input_s, weight_s

    def only_in_w(self, first: int, last: int) -> frozenset[int]:
        """The units of a stage whose gradients are all computed in W: nothing that enters the stage and needs
        a gradient leads to them. In the first stage these are all units or none; in a later one those of
        another branch that begins there, such as the first of a decoder behind an encoder.

        >>> units = tuple(
        ...     Unit(name, 1.0, 2.0, backward_input_s=seconds, backward_weight_s=2.0 - seconds)
        ...     for name, seconds in (("encoder", 1.0), ("embed", 0.0), ("decoder", 1.0)))
        >>> past = (SpanningValue(4, 4, 0, (2,)),)
        >>> costs = CostModel(units, (4, 8), entry_bytes=(4, 4), spanning=past)
        >>> sorted(costs.only_in_w(1, 2))
        [1]
        """
        late = self._only_in_w.get((first, last))
        if late is None:
            late = self._only_in_w[first, last] = self._computed_in_w_alone(first, last)
        return late

    @cached_property
    def _only_in_w(self) -> dict[tuple[int, int], frozenset[int]]:
        """`only_in_w` of the stages that were asked for: several costs of a stage depend on it."""
        return {}

    def _computed_in_w_alone(self, first: int, last: int) -> frozenset[int]:
        stage = range(first, last + 1)
        if any(self.units[unit].backward_input_s is None for unit in stage):
            return frozenset()
        if not first:
            trained = next((unit for unit in self.units[: last + 1] if unit.backward_s > 0.0), None)
            return frozenset(stage if trained is not None and not trained.backward_input_s else ())
        if self.entry_bytes is None or all(self.led_from[unit] for unit in stage):
            return frozenset()
        late = set[int]()
        for unit in stage:
            if all(maker in late for maker in self.led_from[unit]):
                late.add(unit)
        return frozenset(late)

    @cached_property
    def led_from(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, those that make what it is given and needs a gradient; -1 for the model's inputs,
        as far as they go past the first unit.
        """
        makers: list[list[int]] = [[] for _ in self.units]
        for border, size in enumerate(self.direct_gradient_bytes):
            if size:
                makers[border + 1].append(border)
        for value in self.spanning:
            if value.gradient_bytes:
                for user in value.users:
                    makers[user].append(value.maker)
        return tuple(map(tuple, makers))

    @cached_property
    def direct_bytes(self) -> tuple[int, ...]:
        """One number a border: what the unit in front makes for the one behind alone."""
        return tuple(
            max(size - sum(it.sent_bytes(border) for it in across), 0)
            for border, (size, across) in enumerate(zip(self.crossing_bytes, self.across, strict=True))
        )

    @cached_property
    def direct_gradient_bytes(self) -> tuple[int, ...]:
        """One number a border: the gradients of what the unit in front makes for the one behind alone."""
        return tuple(
            max(size - sum(it.sent_gradient_bytes(border) for it in across), 0)
            for border, (size, across) in enumerate(zip(self.gradient_bytes, self.across, strict=True))
        )

    @cached_property
    def gradient_memory(self) -> GradientMemory:
        """What gradients are there beside those of a unit; remembered, as stages with one end differ in where
        they begin.
        """
        return GradientMemory(self.across, self.spanning, self.shared_gradients)

    def gradients_for_w(self, late: frozenset[int], first: int, last: int) -> tuple[int, int]:
        """What I of a stage leaves to W for the units `late`: gradients of what they make, in bytes; those
        that are sent to the stage, and those that its other units compute.

        Args:
            late: from `only_in_w`.
            first: the first unit of the stage.
            last: its last one.
        """
        sent = computed = 0
        if late and last + 1 < len(self.units):
            sent = self.direct_gradient_bytes[last] if last in late else 0
            sent += sum(it.sent_gradient_bytes(last) for it in self.across[last] if it.maker in late)
        if len(late) <= last - first:
            for unit in late - {last}:
                computed += 0 if unit + 1 in late else self.direct_gradient_bytes[unit]
            for value in self.spanning:
                if value.maker in late and value.last <= last and not late.issuperset(value.users):
                    computed += value.gradient_bytes
        return sent, computed

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal cost model."""
        return _json.write(self, "partita.costs")

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.costs")
