"""A world of one rank."""

from __future__ import annotations

from typing import Any

from partita.runtime import InProcessWorld


def alone(function: Any, *args: Any) -> Any:
    """Run with a comm of one rank."""
    return InProcessWorld(1).run(function, *args)[0]
