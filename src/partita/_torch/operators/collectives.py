"""When a function calls other ranks through torch, and which ranks a graph calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["before_collectives", "collectives_in", "group_argument"]


class before_collectives(TorchDispatchMode):  # noqa: N801 - a context manager that reads as a verb
    """Within this block ``tell`` is called right before each operator that exchanges anything with other
    ranks of a process group, with its name.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.endswith(("c10d", "c10d_functional")):
            self._tell(func.name())
        return func(*args, **(kwargs or {}))


def group_argument(node: Node) -> str | None:
    """The argument in which a collective of a graph has the name of its group; None for another node."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target.namespace.startswith("_c10d"):
        return None
    names = [argument.name for argument in target._schema.arguments]
    group = {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("group_name")
    return group if isinstance(group, str) else None


def collectives_in(gm: GraphModule) -> Iterator[tuple[str, list[int]]]:
    """Yield for each collective of a graph its name and the global ranks that it is for; those whose group
    this process does not know are left out.
    """
    for node in gm.graph.nodes:
        group = group_argument(node)
        if group is None:
            continue
        try:
            members = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        except (LookupError, RuntimeError):
            continue
        yield node.target._schema.name.partition("::")[2], dist.get_process_group_ranks(members)
