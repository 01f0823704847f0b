"""``partita demo``: a real model on real data, trained cut and uncut, and proven to be equal."""

from __future__ import annotations

__all__: list[str] = []
