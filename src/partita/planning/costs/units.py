"""The units of a model, which a cut may not divide."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import PlanError
from partita.planning._check import require_amount, require_part, require_seconds

__all__ = ["TiedUnits", "Unit"]


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
        weight_activation_bytes: what the gradient of the inputs leaves for that of the weights: activations,
            and the gradients that it has caught on its way, so it may be more than `activation_bytes`; as
            much as these where it is not given.
        forward_workspace_bytes: what the forward pass needs at most while it runs, beyond what it keeps.
        backward_workspace_bytes: what the backward pass needs at most while it runs, beyond what is kept.
        copied_gradient_bytes: what the backward pass needs beyond that in the first unit of a stage, where
            each input has a gradient of its own; within a stage inputs may share one (those of a sum do).
        input_workspace_bytes: what the gradient of the inputs alone needs at most, beyond what is kept; what
            it catches counts.
        weight_workspace_bytes: what the gradient of the weights alone needs at most, beyond what is left to
            it; given together with `input_workspace_bytes`.
        spread: how far the repeats of a measurement lay apart: the longest less the shortest forward and
            backward pass, over the median; 0.0 where nothing was measured.
        caught_bytes: of what is left for the weights, the gradients that were sent for what the unit makes.
        has_weights: whether its backward pass computes something in W. One that does not leaves memory to W
            only where a unit behind it in its stage does, and so holds on to the graph in front of it.
        kind: the same number for units that are equal: the same operations, on tensors of the same shapes and
            dtypes. None: equal to no other.

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
    weight_activation_bytes: int | None = None
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    input_workspace_bytes: int | None = None
    weight_workspace_bytes: int | None = None
    spread: float = 0.0
    caught_bytes: int = 0
    copied_gradient_bytes: int = 0
    has_weights: bool = True
    kind: int | None = None

    def __post_init__(self) -> None:
        of = f"of unit {self.name!r}"
        require_seconds(self.forward_s, f"forward_s {of}")
        require_seconds(self.backward_s, f"backward_s {of}")
        for what in (
            "parameter_bytes",
            "parameters",
            "activation_bytes",
            "caught_bytes",
            "copied_gradient_bytes",
            "forward_workspace_bytes",
            "backward_workspace_bytes",
        ):
            require_amount(getattr(self, what), f"{what} {of}")
        if (self.backward_input_s is None) != (self.backward_weight_s is None):
            raise PlanError(
                f"unit {self.name!r} has one of backward_input_s and backward_weight_s: give both or none"
            )
        if self.backward_input_s is not None and self.backward_weight_s is not None:
            require_seconds(self.backward_input_s, f"backward_input_s {of}")
            require_seconds(self.backward_weight_s, f"backward_weight_s {of}")
        for what in ("weight_activation_bytes", "input_workspace_bytes", "weight_workspace_bytes"):
            if getattr(self, what) is not None:
                require_amount(getattr(self, what), f"{what} {of}")
        if (self.input_workspace_bytes is None) != (self.weight_workspace_bytes is None):
            raise PlanError(
                f"unit {self.name!r} has one of input_workspace_bytes and weight_workspace_bytes: give both "
                "or none"
            )
        require_part(self.spread, f"spread {of}")

    @property
    def weight_bytes(self) -> int:
        """What the gradient of the inputs leaves for that of the weights, in bytes."""
        if self.weight_activation_bytes is None:
            return self.activation_bytes
        return self.weight_activation_bytes


@dataclass(frozen=True)
class TiedUnits:
    """Units that use the same parameters, such as an embedding and the head that has its matrix.

    Each of the units counts them as its own, since every stage that has one of the units holds them. A
    stage that has several of the units holds them once. In the backward pass of each microbatch their
    gradient goes from the last stage that holds them to the first, and each adds its share.

    Attributes:
        units: the numbers of the units, in order.
        parameter_bytes: their bytes.
        parameters: how many numbers they hold.
        gradient_bytes: of the gradient; 0 where none of them is trained, or it is summed once a step.
        reduced_bytes: of the gradient, where it is summed once a step (`reduced_tied_gradients`).

    Raises:
        PlanError: fewer than two units, units that are not in order, or a size that is negative.

    >>> tied = TiedUnits((0, 3), parameter_bytes=8)
    >>> tied.repeats(0, 3), tied.repeats(0, 2)
    (1, 0)
    """

    units: tuple[int, ...]
    parameter_bytes: int
    parameters: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0

    def __post_init__(self) -> None:
        for unit in self.units:
            require_amount(unit, "a unit of tied parameters")
        if len(self.units) < 2 or tuple(sorted(set(self.units))) != self.units:
            raise PlanError(
                f"tied parameters have the units {self.units!r:.60}: give two or more, each once, in order"
            )
        require_amount(self.parameter_bytes, "parameter_bytes of tied parameters")
        require_amount(self.parameters, "parameters of tied parameters")
        require_amount(self.gradient_bytes, "gradient_bytes of tied parameters")
        require_amount(self.reduced_bytes, "reduced_bytes of tied parameters")

    def repeats(self, first: int, last: int) -> int:
        """How often too many the units from `first` to `last` count them, for a stage of these units."""
        return max(bisect_right(self.units, last) - bisect_left(self.units, first) - 1, 0)

    def used_in(self, first: int, last: int) -> tuple[int, ...]:
        """Those of the units that are in a stage of the units from `first` to `last`."""
        return self.units[bisect_left(self.units, first) : bisect_right(self.units, last)]

    def is_sent(self, first: int, last: int) -> bool:
        """Whether a stage of these units sends the gradient to an earlier one.

        >>> tied = TiedUnits((0, 3), parameter_bytes=8)
        >>> tied.is_sent(2, 3), tied.is_sent(0, 1), tied.is_received(0, 1), tied.is_received(1, 2)
        (True, False, True, False)
        """
        used = self.used_in(first, last)
        return bool(used) and used[0] > self.units[0]

    def is_received(self, first: int, last: int) -> bool:
        """Whether a stage of these units is sent the gradient by a later one."""
        used = self.used_in(first, last)
        return bool(used) and used[-1] < self.units[-1]

    def stays_on(self, stages: Sequence[tuple[int, int]], first: int, last: int) -> bool:
        """Whether a stage of these units sends it to one of `stages`, each its first and its last unit."""
        if not self.is_sent(first, last):
            return False
        before = self.units[bisect_left(self.units, first) - 1]
        return any(start <= before <= end for start, end in stages)
