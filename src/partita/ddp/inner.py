"""The compiler of forward graphs and backward pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.fx import GraphModule

from partita.errors import UsageError

__all__ = ["InnerCompiler", "resolve_inner"]

InnerCompiler: TypeAlias = str | Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""``"inductor"``, ``"aot_eager"``, or a function from a flat graph and example inputs to what runs it."""


def resolve_inner(inner: InnerCompiler) -> InnerCompiler:
    """What `compile_training` takes.

    Raises:
        UsageError: a name that is not known, or what can't be called.
    """
    if inner == "inductor":
        return inner
    if inner == "aot_eager":
        return _as_it_is
    if isinstance(inner, str) or not callable(inner):
        raise UsageError(
            f"inner is 'inductor', 'aot_eager' or a function (gm, example_inputs) -> callable, got {inner!r}"
        )
    return inner


def _as_it_is(gm: GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward
