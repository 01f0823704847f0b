"""Autocast blocks of a graph inside of a checkpointed region, where Dynamo traces it."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

__all__ = ["trace_autocast_in_regions"]


@cache
def trace_autocast_in_regions() -> None:
    """Let Dynamo trace, inside a checkpointed region, the functions with which a graph enters autocast.

    It puts ``torch.set_autocast_enabled`` and its kin into its graph as calls without keywords, ``None``. At
    the root of a graph that is one call like another; in the graph of a region (``torch.utils.checkpoint``)
    it is a TypeError. For all threads, and for good: where nothing was wrong nothing changes, and Dynamo may
    trace again at any later call of what it has compiled.
    """
    from torch._dynamo.output_graph import SubgraphTracer  # half a second, for who compiles

    create_node = SubgraphTracer.create_node

    @wraps(create_node)
    def with_keywords(
        self: Any, kind: Any, target: Any, args: Any = None, kwargs: Any = None, *rest: Any, **named: Any
    ) -> Any:
        return create_node(self, kind, target, args or (), kwargs or {}, *rest, **named)

    SubgraphTracer.create_node = with_keywords  # type: ignore[method-assign]
