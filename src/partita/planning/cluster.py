"""The machines that a plan is made for: how many ranks, how fast the links, how much memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import require_amount, require_count, require_seconds

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """Equal ranks with an α-β link between any two: `n` bytes take ``latency_s + n / bandwidth``.

    (R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994.) The default link
    takes no time.

    Attributes:
        ranks: how many processes there are.
        bandwidth_bytes_per_s: of one link in one direction; infinity where transfers cost nothing but
            latency.
        latency_s: seconds before the first byte arrives.
        memory_bytes: what one rank may hold; None where there is no limit.

    Raises:
        PlanError: a value that is negative or no number, or a bandwidth of zero.

    >>> Cluster(ranks=2, bandwidth_bytes_per_s=1e9, latency_s=1e-5).transfer_s(1_000_000)
    0.00101
    """

    ranks: int
    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        require_count(self.ranks, "ranks")
        require_seconds(self.latency_s, "latency_s")
        bandwidth = self.bandwidth_bytes_per_s
        if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float) or not bandwidth > 0:
            raise PlanError(f"bandwidth_bytes_per_s is {bandwidth!r}: give a number above 0, or infinity")
        if self.memory_bytes is not None:
            require_amount(self.memory_bytes, "memory_bytes")

    def transfer_s(self, size_bytes: int) -> float:
        """Seconds that one message takes from one rank to another. An empty one takes the latency."""
        require_amount(size_bytes, "size_bytes")
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    def all_reduce_s(self, size_bytes: int) -> float:
        """Seconds to sum over all r ranks by a ring: ``2 (r - 1)`` steps of an r-th of the bytes each.

        (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009.)
        """
        require_amount(size_bytes, "size_bytes")
        steps = 2 * (self.ranks - 1)
        return steps * (self.latency_s + size_bytes / self.ranks / self.bandwidth_bytes_per_s)

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal cluster."""
        return _json.write(self, "partita.cluster")

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.cluster")
