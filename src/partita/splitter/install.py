"""Giving a piece the parameters, buffers and modules that its graph refers to, under their original names."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.fx import Graph

from partita.graph.state import Attribute, attribute

__all__ = ["attributes_of", "install"]


def attributes_of(source: nn.Module, graph: Graph) -> list[Attribute]:
    """What the graph refers to, looked up in the module that it was cut from; each name once, outer names first."""
    found: dict[str, Attribute] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target not in found:
            found[str(node.target)] = attribute(source, node)
    return sorted(found.values(), key=lambda item: item.target.count("."))


def install(root: nn.Module, attributes: Iterable[Attribute]) -> None:
    """Register each attribute at its dotted name, with empty modules for the path.

    A module of the user's is put in as it is and never written to: what it holds already is found there.
    """
    borrowed: dict[int, nn.Module] = {}
    for item in attributes:
        *path, name = item.target.split(".")
        parent = root
        for atom in path:
            child = getattr(parent, atom, None)
            if child is None:
                child = nn.Module().train(root.training)
                parent.add_module(atom, child)
            parent = child
            if id(parent) in borrowed:
                break
        if id(parent) in borrowed:
            continue
        _register(parent, name, item)
        if item.kind == "module":
            borrowed[id(item.value)] = item.value


def _register(parent: nn.Module, name: str, item: Attribute) -> None:
    if item.kind == "buffer":
        parent.register_buffer(name, item.value, persistent=item.persistent)
    else:
        setattr(parent, name, item.value)
