"""Registering one module's parameters and buffers in another, under the same names."""

from __future__ import annotations

from torch import nn

from partita._torch.modules.contents import (
    is_buffer,
    is_persistent_buffer,
    named_state,
    named_tables,
    own_module,
)

__all__ = ["order_as_in", "register_as_in", "register_missing"]


def register_as_in(source: nn.Module, module: nn.Module, name: str) -> None:
    """Register the parameter or buffer of ``source`` of that name in ``module``, unless there is one. It is
    the same tensor, and submodules on the way to it are made.
    """
    *path, leaf = name.split(".")
    for atom in path:
        source = source.get_submodule(atom)
        child = getattr(module, atom, None)
        if child is None:
            child = nn.Module().train(source.training)
            module.add_module(atom, child)
        module = child
    if hasattr(module, leaf):
        return
    tensor = getattr(source, leaf)
    if is_buffer(source, leaf):
        module.register_buffer(leaf, tensor, persistent=is_persistent_buffer(source, leaf))
    else:
        module.register_parameter(leaf, tensor)


def register_missing(source: nn.Module, module: nn.Module) -> None:
    """Register all parameters and buffers of ``source`` in ``module`` that are not there under their names.

    >>> module = nn.Module()
    >>> register_missing(nn.Sequential(nn.Linear(2, 2, bias=False)), module)
    >>> [name for name, _ in module.named_parameters()]
    ['0.weight']
    """
    names = {name for name, _ in named_state(module)}
    for name, _ in named_state(source):
        if name not in names:
            register_as_in(source, module, name)


def order_as_in(source: nn.Module, module: nn.Module) -> None:
    """Put the parameters, buffers and children of ``module`` into the order that ``source`` has them in.
    Modules that both share stay as they are.

    >>> from collections import OrderedDict
    >>> module = nn.Sequential(OrderedDict({"1": nn.Tanh(), "0": nn.ReLU()}))
    >>> order_as_in(nn.Sequential(nn.ReLU(), nn.Tanh()), module)
    >>> list(module._modules)
    ['0', '1']
    """
    tables = zip(
        (*named_tables(source), source._modules), (*named_tables(module), module._modules), strict=True
    )
    for wanted, table in tables:
        places = {name: place for place, name in enumerate(wanted)}
        in_order = sorted(table.items(), key=lambda item: places.get(item[0], len(places)))
        table.clear()
        table.update(in_order)
    for name, child in module.named_children():
        there = own_module(source, name)
        if there is not None and there is not child:
            order_as_in(there, child)
