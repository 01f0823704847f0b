"""Where a model is cut: by hand or by plan."""

from __future__ import annotations

from partita.pipelining.frontends.cuts.annotations import annotate_split_points, clear_split_points

__all__ = ["annotate_split_points", "clear_split_points"]
