"""What a model costs: the units that a cut may not divide, and the bytes alive between them."""

from __future__ import annotations

from dataclasses import dataclass

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import require_amount, require_count, require_seconds

__all__ = ["CostModel", "Unit"]


@dataclass(frozen=True)
class Unit:
    """The smallest thing that a cut may not divide (a node, a module, a block), costed for one microbatch.

    Attributes:
        name: unique in its cost model.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the whole backward pass.
        parameter_bytes: bytes of the parameters that the unit owns.
        parameters: how many numbers those parameters hold.
        activation_bytes: bytes kept from the forward pass until the backward pass.
        modules: the qualified names of the modules that the unit stands for.
        backward_input_s: seconds of the gradient of the inputs alone, where that was measured.
        backward_weight_s: seconds of the gradient of the weights alone; given together with
            `backward_input_s`.

    Raises:
        PlanError: a time or a size that is negative or no number, or one half of the backward pass without
        the other.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int = 0
    parameters: int = 0
    activation_bytes: int = 0
    modules: tuple[str, ...] = ()
    backward_input_s: float | None = None
    backward_weight_s: float | None = None

    def __post_init__(self) -> None:
        of = f"of unit {self.name!r}"
        require_seconds(self.forward_s, f"forward_s {of}")
        require_seconds(self.backward_s, f"backward_s {of}")
        for what in ("parameter_bytes", "parameters", "activation_bytes"):
            require_amount(getattr(self, what), f"{what} {of}")
        if (self.backward_input_s is None) != (self.backward_weight_s is None):
            raise PlanError(
                f"unit {self.name!r} has one of backward_input_s and backward_weight_s: give both or none"
            )
        if self.backward_input_s is not None and self.backward_weight_s is not None:
            require_seconds(self.backward_input_s, f"backward_input_s {of}")
            require_seconds(self.backward_weight_s, f"backward_weight_s {of}")


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

    Raises:
        PlanError: no units, a name used twice, or a length or a border that does not fit the units.

    >>> costs = CostModel((Unit("embed", 1.0, 2.0), Unit("block", 3.0, 6.0)), crossing_bytes=(1024,))
    >>> CostModel.from_json(costs.to_json()) == costs
    True
    """

    units: tuple[Unit, ...]
    crossing_bytes: tuple[int, ...]
    crossing_grad_bytes: tuple[int, ...] | None = None
    borders: frozenset[int] | None = None

    def __post_init__(self) -> None:
        require_count(len(self.units), "the number of units")
        seen: set[str] = set()
        for unit in self.units:
            if unit.name in seen:
                raise PlanError(f"two units are named {unit.name!r}: give each its own name")
            seen.add(unit.name)
        between = len(self.units) - 1
        for what in ("crossing_bytes", "crossing_grad_bytes"):
            sizes = getattr(self, what)
            if sizes is None:
                continue
            if len(sizes) != between:
                raise PlanError(
                    f"{what} has {len(sizes)} numbers for {len(self.units)} units: give {between}"
                )
            for index, size in enumerate(sizes):
                require_amount(size, f"{what}[{index}]")
        for border in self.borders or ():
            if not 0 <= border < between:
                raise PlanError(
                    f"border {border!r} does not exist: {len(self.units)} units have borders 0 to "
                    f"{between - 1}"
                )

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """One number a border: bytes that the backward pass of one microbatch carries across it."""
        return self.crossing_bytes if self.crossing_grad_bytes is None else self.crossing_grad_bytes

    @property
    def allowed_borders(self) -> tuple[int, ...]:
        """The borders at which a cut is allowed, in order."""
        return tuple(range(len(self.units) - 1)) if self.borders is None else tuple(sorted(self.borders))

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal cost model."""
        return _json.write(self, "partita.costs")

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.costs")
