"""Calls that end in an exception which the model catches, as ``try: layer(x, mask)`` with
``except TypeError: layer(x)`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental import proxy_tensor

from partita._torch.containers.replaced import replaced

__all__ = ["ended_calls_forgotten"]


@contextmanager
def ended_calls_forgotten() -> Iterator[None]:
    """While ``torch.export`` traces (not strictly), forget what an exception ends.

    A call of a module is taken out of the record of calls that are under way, and not counted: torch leaves
    it there, and stumbles over it at the end of the call around it. A call of an operator that fails is taken
    out of the graph, where it would fail at each run.
    """
    operators: Any = proxy_tensor
    modules: Any = operators._ModuleStackTracer
    call_module, proxy_call = modules.call_module, operators.proxy_call

    def call_module_or_forget(tracer: Any, *call: Any) -> Any:
        depth = len(tracer.module_stack)
        try:
            return call_module(tracer, *call)
        except BaseException:
            while len(tracer.module_stack) > depth:
                _, (path, _) = tracer.module_stack.popitem()
                tracer.num_calls[path] -= 1
            raise

    def proxy_call_or_forget(mode: Any, *call: Any) -> Any:
        graph = mode.tracer.graph
        last = graph._root.prev
        try:
            return proxy_call(mode, *call)
        except BaseException:
            while graph._root.prev is not last:
                graph.erase_node(graph._root.prev)
            raise

    with (
        replaced(modules, "call_module", call_module_or_forget),
        replaced(operators, "proxy_call", proxy_call_or_forget),
    ):
        yield
