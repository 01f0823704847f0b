"""What is known of one backward pass while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from partita._torch.autograd.running_pass import grad_version
from partita.ddp.reducing.bucket_layout import BucketLayout
from partita.ddp.reducing.reduction import Reduction

__all__ = ["PassState"]


@dataclass
class PassState:
    """One backward pass over all of its tasks (a reentrant checkpoint runs tasks within tasks). Parameters
    are known by their index.

    Attributes:
        sync: its gradients are reduced.
        started_s: on the monotonic clock.
        tasks: numbers of autograd's tasks.
        root: the task that ends with the pass; None where only tasks within other tasks have been seen.
        expected: which gradients a bucket waits for.
        early: parameters whose offers are taken.
        remaining: for each parameter that compiled graphs use, how many of them will still offer a gradient;
            below 0 where more have come than were known of.
        partial: what they have offered so far.
        gradients: those that are there: None for what lies in ``grad`` or in a bucket.
        versions: of ``grad``, when the gradient was there.
        ready_s: when that was, on the monotonic clock.
        reductions: of the buckets that have been sent, in order.
        used_before: which parameters were used since the last synchronised pass, when this one began.
    """

    sync: bool
    started_s: float = 0.0
    tasks: set[int] = field(default_factory=set)
    root: int | None = None
    expected: list[bool] = field(default_factory=list)
    early: set[int] = field(default_factory=set)
    remaining: dict[int, int] = field(default_factory=dict)
    partial: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)
    reductions: list[Reduction] = field(default_factory=list)
    used_before: tuple[bool, ...] = ()

    def added_to_partial(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The sum of what was offered before and ``gradient``; what was offered before is taken out."""
        before = self.partial.pop(index, None)
        if before is None:
            return gradient
        return before if gradient is None else before + gradient

    def is_complete(self, bucket: BucketLayout) -> bool:
        """Whether all gradients that ``bucket`` waits for are there."""
        return all(slot.index in self.gradients or not self.expected[slot.index] for slot in bucket.slots)

    def taken_from(self, bucket: BucketLayout, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of ``bucket`` lie in its memory now."""
        for slot in bucket.slots:
            if slot.index in self.gradients:
                self.gradients[slot.index] = None
                self.versions[slot.index] = grad_version(parameters[slot.index])

    def in_bucket(self, bucket: BucketLayout) -> dict[int, torch.Tensor | None]:
        """The gradients of ``bucket`` that are there."""
        return {
            slot.index: self.gradients[slot.index] for slot in bucket.slots if slot.index in self.gradients
        }
