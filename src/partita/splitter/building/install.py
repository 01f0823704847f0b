"""Giving a piece the parameters, buffers and modules that its graph refers to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from torch.fx import Node

from partita._torch.modules.contents import own_module, owns_attribute
from partita.graph.attributes import Attribute, attribute

__all__ = ["attributes_of", "install", "renamed"]


def attributes_of(source: nn.Module, nodes: Iterable[Node]) -> list[Attribute]:
    """Return what ``get_attr`` and ``call_module`` nodes refer to in the module that they were cut from.

    Each name comes once. For a value that is computed on access (a parametrised weight) it is the module that
    computes it.
    """
    attributes: dict[str, Attribute] = {}
    for node in nodes:
        target = str(node.target)
        if node.op in ("get_attr", "call_module") and target not in attributes:
            attributes[target] = _stored(source, attribute(source, node))
    return list(attributes.values())


def _stored(source: nn.Module, item: Attribute) -> Attribute:
    path, _, name = item.target.rpartition(".")
    if item.kind != "constant" or not path:
        return item
    parent = source.get_submodule(path)
    return item if owns_attribute(parent, name) else Attribute(path, parent, "module")


def install(root: nn.Module, attributes: Iterable[Attribute]) -> None:
    """Register each attribute under its qualified name, with empty modules for the path.

    A module of the user's is registered as it is and never changed: attributes inside it are there already.
    """
    users_modules: set[int] = set()
    for item in sorted(attributes, key=lambda item: item.target.count(".")):
        *path, name = item.target.split(".")
        parent = root
        for atom in path:
            child = own_module(parent, atom)
            if child is None:
                child = nn.Module().train(root.training)
                parent.add_module(atom, child)
            parent = child
            if id(parent) in users_modules:
                break
        if id(parent) in users_modules:
            continue
        _register(parent, name, item)
        if item.kind == "module":
            users_modules.add(id(item.value))


def renamed(attributes: Iterable[Attribute], names: dict[str, str]) -> list[Attribute]:
    """Return the same attributes under the names that a piece uses."""
    return [replace(item, target=names.get(item.target, item.target)) for item in attributes]


def _register(parent: nn.Module, name: str, item: Attribute) -> None:
    if item.kind == "module":
        parent.add_module(name, item.value)
    elif item.kind == "buffer":
        parent.register_buffer(name, item.value, persistent=item.persistent)
    elif item.kind == "parameter":
        parent.register_parameter(name, item.value)
    else:  # which may be a parameter by its type, too
        vars(parent)[name] = item.value
