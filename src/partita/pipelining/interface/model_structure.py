"""A model's structure as text, so that ranks can see whether they have cut the same one: borders may look
alike where parts that other ranks hold do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.modules.contents import named_state

__all__ = ["structure_of"]

_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.memory_format, torch.layout)


def structure_of(model: nn.Module) -> tuple[str, ...]:
    """A line for each parameter and buffer (name, dtype, shape), and for each call of a graph.

    Equal in every process, and on every device, for one model.

    >>> structure_of(nn.Linear(2, 3, bias=False))
    ('weight: float32[3, 2]',)
    """
    lines = [f"{name}: {_tensor(tensor)}" for name, tensor in named_state(model)]
    return (*lines, *(_calls(model.graph) if isinstance(model, GraphModule) else ()))


def _tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _calls(graph: Graph) -> list[str]:
    return [_call(node) for node in graph.nodes if node.op.startswith("call_")]


def _call(node: Node) -> str:
    target = node.target if isinstance(node.target, str) else _name(node.target)
    settings = [*node.args, *(node.kwargs[name] for name in sorted(node.kwargs))]
    return f"{target}({', '.join(map(_argument, settings))})"


def _name(target: object) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return str(target) if str(target).startswith(("aten.", "prims.")) or name is None else str(name)


def _argument(value: object) -> str:
    """Constants as they are; of everything else (values, devices) only that it is there."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return "_"
