"""Attributes of torch's classes and modules that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]

_MISSING = object()


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """In this block, a class or module has this attribute, instead of its own or of one that it inherits."""
    before = vars(holder).get(name, _MISSING)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
