"""One data parallel backward pass as frozen data: its buckets, and when each was on its way.

Times are in seconds from the start of the pass, on the clock of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.errors import ReportError
from partita.reporting.drawing.checks import require_quantity

__all__ = ["BackwardPass", "ReducedBucket"]


@dataclass(frozen=True, slots=True)
class ReducedBucket:
    """Gradients that were averaged over all ranks together.

    Args:
        bucket: its number; buckets are sent in this order.
        parameters: names of those whose gradients lie in it.
        size_bytes: of the gradients.
        dtype: of the gradients, such as ``"float32"``.
        ready_s: its last gradient was there; None where no gradient came.
        sent_s: its reduction started.
        finished_s: its mean was known to be there. A rank looks for it at the end of its backward pass.
        exposed_s: how long the rank waited for the mean with nothing else to do, up to `finished_s`.

    Raises:
        ReportError: a quantity is negative or not finite, or a bucket is finished before it is sent.
    """

    bucket: int
    parameters: tuple[str, ...]
    size_bytes: int
    dtype: str
    ready_s: float | None
    sent_s: float
    finished_s: float
    exposed_s: float

    def __post_init__(self) -> None:
        for name in ("bucket", "size_bytes", "sent_s", "finished_s", "exposed_s"):
            require_quantity("ReducedBucket", name, getattr(self, name))
        if self.ready_s is not None:
            require_quantity("ReducedBucket", "ready_s", self.ready_s)
        if self.finished_s < self.sent_s:
            raise ReportError(
                f"Bucket {self.bucket} is finished at {self.finished_s} s, before it is sent "
                f"({self.sent_s} s); measure both on the same clock."
            )


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """What one rank saw of one backward pass.

    Args:
        rank: whose clock the times are of.
        ranks: how many average their gradients.
        backward_s: how long it took, without waiting for means.
        buckets: in the order in which they are sent.

    Raises:
        ReportError: a quantity is negative or not finite.
    """

    rank: int
    ranks: int
    backward_s: float
    buckets: tuple[ReducedBucket, ...]

    def __post_init__(self) -> None:
        for name in ("rank", "ranks", "backward_s"):
            require_quantity("BackwardPass", name, getattr(self, name))

    @property
    def end_s(self) -> float:
        """When all gradients were there and averaged."""
        return max(self.backward_s, *(bucket.finished_s for bucket in self.buckets), 0.0)

    @property
    def size_bytes(self) -> int:
        """The size of all gradients, in bytes."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that no computation hid."""
        return sum(bucket.exposed_s for bucket in self.buckets)

    @property
    def sent_early(self) -> int:
        """How many buckets were sent before the end of the backward pass."""
        return sum(bucket.sent_s < self.backward_s for bucket in self.buckets)
