"""A structural hash: what is compiled or recorded for one piece serves all pieces with the same hash.

What counts: operators and their order, constants, which value goes where; of every example value its shape,
dtype, strides, device and ``requires_grad``; of parameters and buffers the same, and which of them are one
tensor. What does not count: the names of nodes, attributes, positional inputs and symbols, and the numbers in
parameters and buffers.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.graph_module.nodes import signature_text, symbolic_text
from partita._torch.operators.schemas import is_higher_order, is_operator
from partita._torch.tensors.storage import storage_key
from partita.graph.attributes import attribute
from partita.graph.effects import metadata

__all__ = ["structural_hash"]

_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
)  # fmt: skip
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LARGEST_CONSTANT = 1024
"""In elements. The values of larger constant tensors are not read; such a tensor is equal to itself only."""


def structural_hash(graph: Graph, module: nn.Module | None = None) -> str:
    """Return the hash of a graph: 32 hexadecimal digits.

    Equal hashes mean equal code for values of equal kinds. The reverse is not true: what can't be compared
    (a callable without an importable name, an attribute of unknown type on a user's module) counts as
    different, and such hashes are valid in this process only.

    Args:
        module: has the attributes that the graph refers to; by default the module that owns the graph.

    Raises:
        GraphError: the module does not have an attribute that the graph refers to.

    >>> import torch
    >>> trace = torch.fx.symbolic_trace
    >>> first = trace(lambda x: torch.sin(x) + 1)
    >>> second = trace(lambda other: torch.sin(other) + 1)
    >>> third = trace(lambda x: torch.sin(x) + 1.0)
    >>> hashes = [structural_hash(gm.graph) for gm in (first, second, third)]
    >>> hashes[0] == hashes[1], hashes[0] == hashes[2]
    (True, False)
    """
    owner = module if module is not None else graph.owning_module
    digest = hashlib.blake2b(digest_size=16)
    for line in _Description(graph, owner).lines():
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


class _Description:
    """The structure of one graph as text, a line for each node."""

    def __init__(self, graph: Graph, owner: nn.Module | None) -> None:
        self.graph = graph
        self.owner = owner
        self.symbols: dict[Any, int] = {}
        self.storages: dict[int, int] = {}
        self.tensors: dict[int, int] = {}
        self.positions: dict[Node, int] = {}

    def lines(self) -> Iterator[str]:
        yield signature_text(self.graph)
        for position, node in enumerate(self.graph.nodes):
            call = f"{node.op} {self._target(node)} {self._value(node.args)} {self._kwargs(node)}"
            yield f"{call} {self._example(node)}"
            self.positions[node] = position

    def _target(self, node: Node) -> str:
        if node.op == "call_function":
            return _callable_text(node.target)
        if node.op == "call_method":
            return str(node.target)
        if node.op not in ("get_attr", "call_module"):
            return ""
        if self.owner is None:
            return f"attribute {node.target}"
        item = attribute(self.owner, node)
        if isinstance(item.value, nn.Module):
            return self._module(item.value)
        if not isinstance(item.value, torch.Tensor):
            return f"constant {self._value(item.value)}"
        values = _numbers(item.value) if item.kind == "constant" else ""
        return f"{item.kind} {self._tensor(item.value)} {values}"

    def _example(self, node: Node) -> str:
        value = metadata(node)
        return "" if value is None else self._value(value)

    def _kwargs(self, node: Node) -> str:
        return ",".join(f"{key}={self._value(value)}" for key, value in sorted(node.kwargs.items()))

    def _value(self, value: Any) -> str:
        """A constant, a node, an example value, or a container of them."""
        if isinstance(value, Node):
            return f"%{self.positions[value]}"
        if isinstance(value, enum.Enum):
            return f"{_callable_text(type(value))}.{value.name}"
        if isinstance(value, _CONSTANTS):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, _SYMBOLIC):
            return f"{type(value).__name__}:{symbolic_text(value, self.symbols)}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value, stored=False)
        if isinstance(value, slice):
            return f"slice({self._value((value.start, value.stop, value.step))})"
        if isinstance(value, dict):
            items = [f"{self._value(key)}:{self._value(item)}" for key, item in value.items()]
            return "{" + ",".join(items) + "}"
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else type(value).__name__
            return f"{kind}({','.join(map(self._value, value))})"
        if isinstance(value, nn.Module):
            return self._module(value)
        return _callable_text(value)

    def _tensor(self, tensor: torch.Tensor, *, stored: bool = True) -> str:
        kind = "" if type(tensor) in (torch.Tensor, nn.Parameter) else type(tensor).__name__
        facts = [kind, str(tensor.dtype), str(tensor.device), str(tensor.layout), str(tensor.requires_grad)]
        sizes: tuple[Any, ...] = tuple(tensor.shape)
        if tensor.layout is torch.strided:
            sizes = (*sizes, "strides", *tensor.stride(), tensor.storage_offset())
        facts.append(self._value(sizes))
        if stored:
            facts.append(f"tensor {self.tensors.setdefault(id(tensor), len(self.tensors))}")
            facts.append(f"storage {self.storages.setdefault(storage_key(tensor), len(self.storages))}")
        return " ".join(facts)

    def _module(self, module: nn.Module) -> str:
        if isinstance(module, GraphModule):
            return f"graph {structural_hash(module.graph, module)} {module.training}"
        state = [
            f"{name} {self._tensor(tensor)}"
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        ]
        modules = module.named_modules(remove_duplicate=False)
        return " ".join([*(f"{name} {self._settings(inner)}" for name, inner in modules), *state])

    def _settings(self, module: nn.Module) -> str:
        """The class and attributes of one module, without its tensors and children."""
        parts = [_callable_text(type(module))]
        for key, value in sorted(vars(module).items()):
            empty = isinstance(value, (dict, set)) and not value
            if key in ("_parameters", "_buffers", "_modules") or empty:
                continue
            text = sorted(map(str, value)) if isinstance(value, (set, frozenset)) else self._value(value)
            parts.append(f"{key}={text}")
        return " ".join(parts)


def _numbers(tensor: torch.Tensor) -> str:
    if tensor.numel() > _LARGEST_CONSTANT or tensor.is_meta or tensor.layout is not torch.strided:
        return f"only {id(tensor)}"
    return str(tensor.detach().cpu().tolist())


def _callable_text(value: Callable[..., Any] | Any) -> str:
    """An importable name, or the identity of the object where it has none."""
    if is_operator(value) or is_higher_order(value):
        return f"operator {value}"
    module = getattr(value, "__module__", None) or "torch"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(name, str) and "<" not in name and _resolve(module, name) is value:
        return f"{module}.{name}"
    bare = getattr(value, "__name__", "")
    if isinstance(bare, str) and bare and _resolve(module, bare) is value:
        return f"{module}.{bare}"
    return f"object {type(value).__qualname__} {id(value)}"


def _resolve(module: str, name: str) -> Any:
    try:
        value: Any = importlib.import_module(module)
        for atom in name.split("."):
            value = getattr(value, atom)
    except (ImportError, AttributeError, ValueError):
        return None
    return value
