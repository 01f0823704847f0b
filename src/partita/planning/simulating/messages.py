"""What lies in the memory of a rank for messages while it computes.

The runtime receives what the next passes take while a pass runs, and holds the gradients that it has sent
until it knows that they are there::

    B0   F3   B1   F4   B2   F5   B3        while B2 runs, what F5 and B3 take is being received, and what B0
                        --                  and B1 have sent back is held
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RECEIVED_AHEAD", "beside_passes"]

RECEIVED_AHEAD = 2
"""How many passes ahead of the one that takes it a message is being received."""


def beside_passes(arriving: Sequence[int], returned: Sequence[int]) -> list[int]:
    """The bytes of messages beside each pass of a rank.

    Args:
        arriving: for each pass what it is sent by other ranks.
        returned: for each pass the gradients that it sends back; 0 for one that sends none.

    >>> beside_passes([4, 4, 8, 8], [0, 0, 2, 2])
    [12, 16, 8, 2]
    """
    ahead = [*arriving, *(0,) * RECEIVED_AHEAD]
    sizes: list[int] = []
    earlier = last = 0
    for position, sent in enumerate(returned, start=1):
        sizes.append(sum(ahead[position : position + RECEIVED_AHEAD]) + earlier + last)
        if sent:
            earlier, last = last, sent
    return sizes
