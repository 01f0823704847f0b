"""How all HTML pages are made: templates of this package, everything escaped, nothing undefined."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import Environment, PackageLoader, StrictUndefined

__all__ = ["environment"]


def environment(**filters: Callable[..., str]) -> Environment:
    """Templates that know these filters besides jinja's own."""
    made = Environment(
        loader=PackageLoader("partita.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(filters)
    return made
