"""What is known of one backward pass while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from partita.ddp.buckets.sparse_reduction import AnyReduction
from partita.ddp.reducing.gradient import Arrival

__all__ = ["PassState"]


@dataclass
class PassState:
    """One backward pass over all of its tasks (a reentrant checkpoint runs tasks within tasks).

    Attributes:
        sync: its gradients are reduced.
        arrivals: of the gradients, by the index of the parameter.
        started_s: on the monotonic clock.
        tasks: numbers of autograd's tasks.
        root: the task that ends with the pass; None where only tasks within other tasks have been seen.
        reductions: of the buckets that have been sent, in order.
    """

    sync: bool
    arrivals: list[Arrival]
    started_s: float = 0.0
    tasks: set[int] = field(default_factory=set)
    root: int | None = None
    reductions: list[AnyReduction] = field(default_factory=list)

    def ready_s(self) -> dict[int, float]:
        """Return when each gradient that has come was there, on the monotonic clock; the first one first."""
        times = {index: one.ready_s for index, one in enumerate(self.arrivals) if one.is_there}
        return dict(sorted(times.items(), key=lambda item: item[1]))
