"""One parameter's gradient: what is known of it from pass to pass, and what becomes of it in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita._torch.tensors.subclasses import inner_tensors

__all__ = ["Arrival", "ParameterGradient"]


@dataclass(slots=True, eq=False)
class ParameterGradient:
    """What is known from one backward pass to the next.

    Attributes:
        name: of the parameter.
        parameter: itself.
        late: other code than compiled graphs uses it too, so what they offer is never the whole gradient.
        used: since the last synchronised pass.
        whole: offers of compiled graphs were the whole gradient when that was last seen, in a pass that did
            not take them.
        came: in the last synchronised pass; True before the first.
    """

    name: str
    parameter: torch.nn.Parameter
    late: bool = False
    used: bool = False
    whole: bool = False
    came: bool = True

    def can_take(self, offer: torch.Tensor | None) -> bool:
        """Return whether ``offer`` can be added to ``grad`` as it is: dense, with memory of its own, and
        of the parameter's kind.
        """
        if torch.is_grad_enabled():
            return False
        parameter = self.parameter
        existing = parameter.grad
        if existing is not None and (
            existing.layout is not torch.strided or existing.dtype != parameter.dtype
        ):
            return False
        return offer is None or (
            offer.layout is torch.strided
            and inner_tensors(offer) is None
            and offer.shape == parameter.shape
            and offer.dtype == parameter.dtype
            and offer.device == parameter.device
        )

    def compare(self, arrival: Arrival) -> None:
        """Note whether what autograd has put into ``grad`` is the sum of the offers that were left to it."""
        left, arrival.left = arrival.left, None
        gradient = self.parameter.grad
        if gradient is not None and left is not None and not self.late:
            self.whole = arrival.to_come == 0 and torch.equal(gradient, left)


@dataclass(slots=True, eq=False)
class Arrival:
    """What becomes of a gradient in one backward pass.

    Attributes:
        expected: a bucket waits for it.
        early: offers of compiled graphs are taken.
        to_come: how many offers compiled graphs will still make; below 0 where more have come than were known
            of; None where none uses the parameter.
        partial: the sum of the offers that were taken, as long as others are to come.
        left: the sum of those that were left to autograd, which finds no other gradient there.
        is_there: all of it.
        value: itself; None for what lies in ``grad`` or in a bucket.
        version: of ``grad``, when it was there.
        times_written: of the parameter, before autograd last added to ``grad``; None where it has not.
        ready_s: when that was, on the monotonic clock.
        used_before: whether the parameter had been used when the pass began.
    """

    expected: bool = False
    early: bool = False
    to_come: int | None = None
    partial: torch.Tensor | None = None
    left: torch.Tensor | None = None
    is_there: bool = False
    value: torch.Tensor | None = None
    version: tuple[int, int] | None = None
    times_written: int | None = None
    ready_s: float = 0.0
    used_before: bool = False

    def with_partial(self, offer: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sum of what was taken before and ``offer``; what was taken before is no longer kept."""
        before, self.partial = self.partial, None
        if before is None:
            return offer
        return before if offer is None else before + offer

    def note_left(self, offer: torch.Tensor) -> None:
        """Note that an offer goes on to autograd. A sparse one could not be taken in any pass."""
        if offer.layout is torch.strided:
            self.left = offer if self.left is None else self.left + offer
