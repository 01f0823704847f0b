"""Looking up the tensors and modules that a graph refers to by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.fx import Node

from partita._torch.modules.contents import is_buffer, is_parameter, is_persistent_buffer
from partita.errors import GraphError

__all__ = ["Attribute", "attribute", "lookup"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A value that a module holds under a qualified name."""

    target: str
    value: Any
    kind: Literal["parameter", "buffer", "module", "constant"]
    persistent: bool = True
    """For a buffer: whether it belongs to the state dict."""


def lookup(root: nn.Module, node: Node) -> Any:
    """Return what a ``get_attr`` or ``call_module`` node refers to.

    Raises:
        GraphError: the module has no such attribute.
    """
    value: Any = root
    target = str(node.target)
    for atom in target.split("."):
        if not hasattr(value, atom):
            raise GraphError(
                f"node {node.name!r} refers to {target!r}, but {type(value).__name__} has no attribute "
                f"{atom!r}: set it on the module that the graph belongs to, or remove the node"
            )
        value = getattr(value, atom)
    return value


def attribute(root: nn.Module, node: Node) -> Attribute:
    """Return the same as `lookup`, with the kind of state that it is."""
    value = lookup(root, node)
    target = str(node.target)
    if isinstance(value, nn.Module):
        return Attribute(target, value, "module")
    parent_name, _, name = target.rpartition(".")
    parent = root.get_submodule(parent_name)
    if is_buffer(parent, name):  # which may be a parameter by its type
        return Attribute(target, value, "buffer", is_persistent_buffer(parent, name))
    if is_parameter(parent, name):  # and this may be registered as nothing
        return Attribute(target, value, "parameter")
    return Attribute(target, value, "constant")
