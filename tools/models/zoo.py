"""All architectures, by the part of the page that they stand in."""

from __future__ import annotations

from tools.models.architecture import Architecture
from tools.models.first import FIRST
from tools.models.second import SECOND

__all__ = ["PARTS", "ZOO"]

PARTS: tuple[tuple[Architecture, ...], ...] = (FIRST, SECOND)
ZOO: tuple[Architecture, ...] = FIRST + SECOND
