"""Buffers that a model assigns anew: ``self.mean = 0.9 * self.mean + 0.1 * h.mean(0)``.

``torch.export`` writes the new value at the end of its graph into the tensor that all have read before::

    exported    mean ---> sub (saved for its backward pass)  ...  mul  add  ...  copy_(mean, add)
    here        mean -> clone ---> sub                       ...  mul  add  copy_(mean, add)  ...

There autograd finds a saved value overwritten, and no cut parts the first reader from the end. In the model
the old tensor stays what it was, so what reads it reads a copy here, and the new value is written when it is
there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

__all__ = ["write_assigned_buffers_at_once"]

_COPY: Any = torch.ops.aten.copy_.default


def write_assigned_buffers_at_once(gm: GraphModule) -> None:
    """Let the nodes that ``torch.export`` puts at the end of a graph for assigned buffers follow what they
    write, in place. A buffer with several names is left as it is.
    """
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    reads = {str(node.target): node for node in gm.graph.find_nodes(op="get_attr")}
    names = Counter(id(_tensor(gm, name)) for name in reads)
    starts = [*reads.values(), *gm.graph.find_nodes(op="placeholder")]
    for write in _writes_at_the_end(gm):
        read, value = write.args
        assert isinstance(read, Node)
        assert isinstance(value, Node)
        if reads[str(read.target)] is not read or names[id(_tensor(gm, str(read.target)))] > 1:
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


def _writes_at_the_end(gm: GraphModule) -> list[Node]:
    """The nodes that were put there for assigned buffers. A tracer names those of a model ``copy_``."""
    nodes = gm.graph.find_nodes(op="call_function", target=_COPY)
    return [
        node
        for node in nodes
        if node.name.startswith("copy__default")
        and isinstance(node.args[0], Node)
        and isinstance(node.args[1], Node)
        and node.args[0].op == "get_attr"
    ]


def _copy_for(readers: list[Node], read: Node) -> Node:
    """A new node, to be placed, which the readers of ``read`` read in its place."""
    copy = read.graph.call_function(torch.ops.aten.clone.default, (read,))
    copy.meta = {key: read.meta[key] for key in ("val", "tensor_meta") if key in read.meta}
    for reader in readers:
        reader.replace_input_with(read, copy)
    return copy


def _tensor(gm: GraphModule, name: str) -> Tensor | None:
    """The parameter, buffer or constant of that name."""
    path, _, leaf = name.rpartition(".")
    return getattr(gm.get_submodule(path), leaf, None)
