"""What one stage costs for one microbatch, as the simulator and the schedules that know times take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from partita.errors import PlanError
from partita.planning._check import require_amount, require_seconds
from partita.planning.schedules.actions import PASS_KINDS, ActionKind

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
        weight_activation_bytes: what is left from the end of I to the end of W: activations, and the
            gradients that I has caught on its way, so it may be more than `activation_bytes`; all that is
            kept and recomputed where it is not given.
        overlap_s: seconds of the forward pass together with a backward pass of another stage, in an
            OVERLAP_F_B; as long as one after the other where it is not given.
        forward_workspace_bytes: what the forward pass needs at most while it runs, beyond what it keeps.
        backward_workspace_bytes: what B, I or W needs at most while it runs, beyond what is kept for it.
        input_workspace_bytes: what I needs at most, where that is known apart; what it catches for W counts.
        weight_workspace_bytes: what W needs at most, likewise.
        arriving_bytes: what F is sent by other ranks.
        arriving_gradient_bytes: what B or I is sent by other ranks.
        returned_gradient_bytes: what B or I sends back to other ranks.
        tied_gradients: the earlier stages that B or I sends gradients of tied parameters to, each with their
            bytes; for those on other ranks they count in `returned_gradient_bytes` too.
        handed_gradients: the earlier stages that B or I hands gradients of values to, each with their bytes.
            On the same rank they wait there until that stage's B or I. Those on other ranks are there where
            `sent_values` is.
        sent_values: the later stages that F hands values to, each with their bytes; on other ranks these are
            messages. None: each stage feeds the next, and what it sends goes there.
        summed_gradients: the gradients that are summed with those of later stages once, after the step: the
            bytes of each, and those stages.
        recompute_s: seconds of the forward pass of what is computed again, at the start of B or I.
        recompute_bytes: what that brings back, kept to the end of B (of W, where it is split).
        unshard_s: seconds to gather the parameters of a sharded stage.
        reduce_grad_s: seconds to sum the gradients over the replicas of the stage.

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
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    recompute_s: float = 0.0
    recompute_bytes: int = 0
    unshard_s: float = 0.0
    reduce_grad_s: float = 0.0
    input_workspace_bytes: int | None = None
    weight_workspace_bytes: int | None = None
    arriving_bytes: int = 0
    arriving_gradient_bytes: int = 0
    returned_gradient_bytes: int = 0
    tied_gradients: tuple[tuple[int, int], ...] = ()
    handed_gradients: tuple[tuple[int, int], ...] = ()
    summed_gradients: tuple[tuple[int, tuple[int, ...]], ...] = ()
    sent_values: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        for what in ("forward_s", "backward_s", "recompute_s", "unshard_s", "reduce_grad_s"):
            require_seconds(getattr(self, what), what)
        if (self.backward_input_s is None) != (self.backward_weight_s is None):
            raise PlanError("one of backward_input_s and backward_weight_s is given: give both or none")
        for what in ("backward_input_s", "backward_weight_s"):
            if getattr(self, what) is not None:
                require_seconds(getattr(self, what), what)
        for what in (
            "send_bytes",
            "activation_bytes",
            "static_bytes",
            "forward_workspace_bytes",
            "backward_workspace_bytes",
            "recompute_bytes",
            "arriving_bytes",
            "arriving_gradient_bytes",
            "returned_gradient_bytes",
        ):
            require_amount(getattr(self, what), what)
        for what in (
            "send_grad_bytes",
            "weight_activation_bytes",
            "input_workspace_bytes",
            "weight_workspace_bytes",
        ):
            if getattr(self, what) is not None:
                require_amount(getattr(self, what), what)
        for what in ("tied_gradients", "handed_gradients", "sent_values"):
            for stage, size in getattr(self, what) or ():
                require_amount(stage, f"a stage of {what}")
                require_amount(size, f"bytes of {what}")
        for size, stages in self.summed_gradients:
            require_amount(size, "bytes of summed_gradients")
            for stage in stages:
                require_amount(stage, "a stage of summed_gradients")
        if self.overlap_s is not None:
            require_seconds(self.overlap_s, "overlap_s")

    @property
    def weight_bytes(self) -> int:
        """What I leaves to W, in bytes."""
        if self.weight_activation_bytes is not None:
            return self.weight_activation_bytes
        return self.activation_bytes + self.recompute_bytes

    def bytes_during(self, kind: ActionKind) -> int:
        """What an F, I, W or B adds to the memory of its rank at most while it runs."""
        workspace = self.backward_workspace_bytes
        if kind is ActionKind.F:
            return self.activation_bytes + self.forward_workspace_bytes
        if kind is ActionKind.W:
            return workspace if self.weight_workspace_bytes is None else self.weight_workspace_bytes
        if kind is ActionKind.I and self.input_workspace_bytes is not None:
            return max(self.recompute_bytes + self.input_workspace_bytes, self.bytes_after(kind))
        if kind is ActionKind.I:  # it frees as it goes, and may catch more for W than that
            return workspace + max(self.recompute_bytes, self.bytes_after(kind))
        return self.recompute_bytes + workspace

    @cached_property
    def bytes_during_each(self) -> tuple[int, ...]:
        """`bytes_during` of each of `PASS_KINDS`."""
        return tuple(map(self.bytes_during, PASS_KINDS))

    def arriving(self, kind: ActionKind) -> int:
        """What an F, I, W or B is sent by other ranks, in bytes."""
        if kind is ActionKind.F:
            return self.arriving_bytes
        return 0 if kind is ActionKind.W else self.arriving_gradient_bytes

    def bytes_after(self, kind: ActionKind) -> int:
        """What an F, I, W or B of a training step adds to the memory of its rank from its end on."""
        if kind is ActionKind.F:
            return self.activation_bytes
        if kind is ActionKind.I:
            return self.weight_bytes - self.activation_bytes
        return -self.weight_bytes if kind is ActionKind.W else -self.activation_bytes

    def gradient_bytes(self, producer: StageCost) -> int:
        """What the backward pass sends back along the edge from `producer`."""
        return producer.send_bytes if self.send_grad_bytes is None else self.send_grad_bytes

    def seconds(self, kind: ActionKind) -> float:
        """How long an F, I, W or B of the stage takes, what is computed again included."""
        if kind is ActionKind.F:
            return self.forward_s
        if kind is ActionKind.B:
            return self.backward_s + self.recompute_s
        split = self.backward_input_s if kind is ActionKind.I else self.backward_weight_s
        seconds = self.backward_s / 2 if split is None else split
        return seconds + self.recompute_s if kind is ActionKind.I else seconds
