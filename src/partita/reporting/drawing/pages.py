"""The templates of HTML pages: everything is escaped, and nothing may be undefined."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import Environment, PackageLoader, StrictUndefined

__all__ = ["environment"]


def environment(**filters: Callable[..., str]) -> Environment:
    """Return the templates of this package, with these filters besides jinja's own."""
    jinja = Environment(
        loader=PackageLoader("partita.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(filters)
    return jinja
