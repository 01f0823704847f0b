"""What one stage costs for one microbatch, as the simulator and the schedules that know times take it."""

from __future__ import annotations

from dataclasses import dataclass

from partita.errors import PlanError
from partita.planning._check import require_amount, require_seconds
from partita.planning.actions import ActionKind

__all__ = ["StageCost"]


@dataclass(frozen=True)
class StageCost:
    """What one stage costs for one microbatch.

    Attributes:
        forward_s: seconds of the forward pass.
        backward_s: seconds of the whole backward pass.
        backward_input_s: seconds of I; half of `backward_s` where it is not given.
        backward_weight_s: seconds of W; half of `backward_s` where it is not given. Both or none.
        send_bytes: what the forward pass sends along each edge that leaves the stage.
        send_grad_bytes: what the backward pass sends back along each edge that enters the stage; where it is
            not given, as much as came along the edge.
        activation_bytes: kept from the start of the forward pass to the end of the backward pass (of W, where
            it is split).
        static_bytes: there all the time: parameters, gradients, optimizer state.
        weight_activation_bytes: what of `activation_bytes` is left from the end of I to the end of W; all
            of it where it is not given.
        overlap_s: seconds of the forward pass together with a backward pass of another stage, in an
            OVERLAP_F_B; as long as one after the other where it is not given.

    Raises:
        PlanError: a value that is negative or no number, or one half of the backward pass without the other.

    >>> StageCost(1.0, 2.0, activation_bytes=10, weight_activation_bytes=4).weight_bytes
    4
    """

    forward_s: float
    backward_s: float
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    send_bytes: int = 0
    send_grad_bytes: int | None = None
    activation_bytes: int = 0
    static_bytes: int = 0
    weight_activation_bytes: int | None = None
    overlap_s: float | None = None

    def __post_init__(self) -> None:
        require_seconds(self.forward_s, "forward_s")
        require_seconds(self.backward_s, "backward_s")
        if (self.backward_input_s is None) != (self.backward_weight_s is None):
            raise PlanError("one of backward_input_s and backward_weight_s is given: give both or none")
        for what in ("backward_input_s", "backward_weight_s"):
            if getattr(self, what) is not None:
                require_seconds(getattr(self, what), what)
        for what in ("send_bytes", "activation_bytes", "static_bytes"):
            require_amount(getattr(self, what), what)
        for what in ("send_grad_bytes", "weight_activation_bytes"):
            if getattr(self, what) is not None:
                require_amount(getattr(self, what), what)
        if self.weight_bytes > self.activation_bytes:
            raise PlanError(
                f"weight_activation_bytes is {self.weight_activation_bytes}, more than activation_bytes "
                f"({self.activation_bytes}), of which it is a part: give at most as many"
            )
        if self.overlap_s is not None:
            require_seconds(self.overlap_s, "overlap_s")

    @property
    def weight_bytes(self) -> int:
        """What I leaves to W, in bytes."""
        return self.activation_bytes if self.weight_activation_bytes is None else self.weight_activation_bytes

    def gradient_bytes(self, producer: StageCost) -> int:
        """What the backward pass sends back along the edge from `producer`."""
        return producer.send_bytes if self.send_grad_bytes is None else self.send_grad_bytes

    def seconds(self, kind: ActionKind) -> float:
        """How long an F, I, W or B of the stage takes."""
        if kind is ActionKind.F:
            return self.forward_s
        if kind is ActionKind.B:
            return self.backward_s
        split = self.backward_input_s if kind is ActionKind.I else self.backward_weight_s
        return self.backward_s / 2 if split is None else split
