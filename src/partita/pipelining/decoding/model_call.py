"""A loop that calls a model again and again, written as if the model were here."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["ModelCall", "Program"]


@dataclass(frozen=True)
class ModelCall:
    """One call of the model, which a `Program` yields.

    Attributes:
        args: positional arguments of the model.
        kwargs: arguments by name.
        state: objects that the model changes and that stay on their stages, such as a cache of keys and
            values; arguments by name too. Those of a program's first call are copied to all stages: they
            are picklable, and empty as yet. Later calls may leave them out, or name the same objects.
        report: anything small that can be pickled, for ``on_report`` on every rank, such as the last tokens.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    report: Any = None


Program: TypeAlias = Generator[ModelCall, Any, Any]
"""Yields calls, is sent what the model returns, and returns a result of its own."""
