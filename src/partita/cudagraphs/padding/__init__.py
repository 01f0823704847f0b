"""Batches that are padded to a few sizes."""

from __future__ import annotations

from partita.cudagraphs.padding.padding import PaddedGraph

__all__ = ["PaddedGraph"]
