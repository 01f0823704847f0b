"""From a model to a graph."""

from __future__ import annotations

from partita.capture.export import Captured, Modes, capture

__all__ = ["Captured", "Modes", "capture"]
