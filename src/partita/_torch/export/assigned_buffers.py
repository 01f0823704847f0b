"""Buffers that a model assigns anew: ``self.mean = 0.9 * self.mean + 0.1 * h.mean(0)``.

``torch.export`` loses what a submodule assigns, and writes what the model itself does where its graph ends,
into the tensor that all have read before::

    exported    mean ---> sub (saved for its backward pass)  ...  mul  add  ...  copy_(mean, add)
    here        mean -> clone ---> sub                       ...  mul  add  copy_(mean, add)  ...

There autograd finds a saved value overwritten, and no cut parts the first reader from the end. In the model
the old tensor stays what it was, so what reads it reads a copy here, and the new value is written when it is
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.nn.modules.module import register_module_buffer_registration_hook

__all__ = ["assignments_recorded", "write_assigned_buffers_at_once"]

_COPY: Any = torch.ops.aten.copy_.default


class _Assign(HigherOrderOperator):
    """Stands in a traced graph for an assignment: of the buffer, and what is assigned."""

    def __init__(self) -> None:
        super().__init__("partita_assign_buffer")

    def __call__(self, buffer: Any, value: Any) -> Any:
        return super().__call__(buffer, value)


_assign = _Assign()
has_side_effect(_assign)


@contextmanager
def assignments_recorded(model: nn.Module) -> Iterator[None]:
    """While ``torch.export`` traces ``model`` (not in strict mode), record what its submodules assign to
    their buffers.
    """
    buffers: dict[tuple[int, str], Proxy] = {}
    assigned: dict[tuple[int, str], Node] = {}

    def record(module: nn.Module, name: str, value: Tensor) -> None:
        mode, old = get_proxy_mode(), module._buffers.get(name)
        if mode is None or module._buffers is model._buffers:
            return  # of the model itself torch knows
        if value is old:
            return  # it was written in place: self.u = normalize(w, out=self.u)
        if not isinstance(value, FakeTensor) or not isinstance(old, FakeTensor):
            return
        tracer: Any = mode.tracer
        key = id(module), name
        buffer, new = buffers.setdefault(key, tracer.unwrap_proxy(old)), tracer.unwrap_proxy(value)
        if isinstance(buffer, Proxy) and isinstance(new, Proxy) and assigned.get(key) is not new.node:
            assigned[key] = new.node
            tracer.create_proxy("call_function", _assign, (buffer, new), {}, name="assign")

    handle = register_module_buffer_registration_hook(record)
    try:
        yield
    finally:
        handle.remove()


def write_assigned_buffers_at_once(gm: GraphModule) -> None:
    """Let the nodes that write to assigned buffers follow what they write, in place. What is assigned to a
    buffer that has several names, or is written to after it was assigned, is left at the end.
    """
    writes = _writes(gm)
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    reads = {str(node.target): node for node in gm.graph.find_nodes(op="get_attr")}
    tensors = {name: id(attrgetter(name)(gm)) for name in reads}
    names = Counter(tensors.values())
    starts = [*reads.values(), *gm.graph.find_nodes(op="placeholder")]
    for write in writes:
        read, value = write.args
        assert isinstance(read, Node)
        assert isinstance(value, Node)
        several = names[tensors[str(read.target)]] > 1
        if reads[str(read.target)] is not read or several or _is_written(value):
            continue
        there = max(value, *starts, key=position.__getitem__)
        readers = [user for user in read.users if user is not write]
        if readers:
            copy = _copy_for(readers, read)
            first = min(readers, key=position.__getitem__)
            if position[first] <= position[there]:
                first.prepend(copy)
            else:
                there.append(copy)
                there = copy
        there.append(write)


def _writes(gm: GraphModule) -> list[Node]:
    """The nodes that write to assigned buffers, one for each: torch's own, which are at the end, and those
    that take the place of the last of the recorded ones.
    """
    last = {node.args[0]: node for node in gm.graph.find_nodes(op="call_function", target=_assign, sort=True)}
    writes = [
        node
        for node in gm.graph.find_nodes(op="call_function", target=_COPY)
        # a tracer names those of a model `copy_`
        if node.name.startswith("copy__default") and all(isinstance(it, Node) for it in node.args)
    ]
    for read, node in last.items():
        with gm.graph.inserting_before(gm.graph.output_node()):
            writes.append(gm.graph.call_function(_COPY, (read, node.args[1])))
        writes[-1].meta = {**_value_of(read), "nn_module_stack": node.meta.get("nn_module_stack")}
    for node in gm.graph.find_nodes(op="call_function", target=_assign):
        gm.graph.erase_node(node)
    return [node for node in writes if isinstance(node.args[0], Node) and node.args[0].op == "get_attr"]


def _is_written(value: Node) -> bool:
    """Whether an operator writes to the value, or to a view of it."""
    aliases = [value]
    for node in aliases:  # which grows
        for user in node.users:
            schema = getattr(user.target, "_schema", None)
            for argument, operand in zip(schema.arguments if schema else (), user.args, strict=False):
                if operand is node and argument.alias_info is not None:
                    if argument.alias_info.is_write:
                        return True
                    aliases.append(user)
    return False


def _copy_for(readers: list[Node], read: Node) -> Node:
    """A new node, to be placed, which the readers of ``read`` read in its place."""
    copy = read.graph.call_function(torch.ops.aten.clone.default, (read,))
    copy.meta = _value_of(read)
    for reader in readers:
        reader.replace_input_with(read, copy)
    return copy


def _value_of(node: Any) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
