"""``partita demo``: a real model on real data, cut, trained on several processes, and proven equal to the
uncut one.
"""

from __future__ import annotations

__all__: list[str] = []
