"""A model's structure as text, so that ranks can check that all of them have cut the same model: borders may
look the same where the parts on other ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.modules.contents import named_state
from partita._torch.operators.collectives import group_argument
from partita._torch.tensors.tensor_text import tensor_text

__all__ = ["structure_of"]

_CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.memory_format, torch.layout)


def structure_of(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each parameter and buffer (name, dtype, shape), and for each call of a graph.

    The lines of one model are equal in every process and on every device.

    >>> structure_of(nn.Linear(2, 3, bias=False))
    ('weight: float32[3, 2]',)
    """
    lines = [f"{name}: {tensor_text(tensor)}" for name, tensor in named_state(model)]
    if isinstance(model, GraphModule):
        values: dict[Node, str] = {}
        for node in model.graph.nodes:
            values[node] = str(node.target) if node.op == "get_attr" else f"%{len(values)}"
        lines += [_call(node, values) for node in model.graph.nodes if node.op.startswith("call_")]
    return tuple(lines)


def _call(node: Node, values: Mapping[Node, str]) -> str:
    target = node.target if isinstance(node.target, str) else _name(node.target)
    group = group_argument(node)  # each rank may have one of its own, under another name
    settings = [*node.args, *(node.kwargs[name] for name in sorted(node.kwargs))]
    arguments = ", ".join(
        "_" if isinstance(value, str) and value == group else _argument(value, values) for value in settings
    )
    return f"{values[node]} = {target}({arguments})"


def _name(target: object) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return str(target) if str(target).startswith(("aten.", "prims.")) or name is None else str(name)


def _argument(value: object, values: Mapping[Node, str]) -> str:
    """Constants as they are, values by their places, and a placeholder for everything else (devices)."""
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, values) for item in value)}]"
    return "_"
