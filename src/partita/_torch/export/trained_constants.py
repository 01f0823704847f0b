"""Tensors that a model trains and that are none of its parameters: attributes, elements of lists, what a
module in a list or a closure has. ``torch.export`` takes them for constants and detaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._export.passes import lift_constants_pass
from torch.fx import GraphModule

from partita._torch.containers.replaced import replaced
from partita._torch.tensors.storage import storage_key

__all__ = ["put_leaves_back", "unregistered_parameters"]


@contextmanager
def unregistered_parameters() -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that a model has no name for (in a list, in a module in a list), as they are met
    in this block. Export detaches them.
    """
    met: list[nn.Parameter] = []
    lift = lift_constants_pass.lift_constants_pass

    def lift_constants(graph: GraphModule, *args: Any) -> Any:
        values = (attrgetter(str(node.target))(graph) for node in graph.graph.find_nodes(op="get_attr"))
        met.extend(value for value in values if isinstance(value, nn.Parameter))
        return lift(graph, *args)

    with replaced(lift_constants_pass, "lift_constants_pass", lift_constants):
        yield met


def put_leaves_back(
    program: torch.export.ExportedProgram, exported: GraphModule, parameters: list[nn.Parameter]
) -> None:
    """Let gradients arrive at tensors that the model has from elsewhere than its parameters and buffers: the
    module that export makes has them detached.
    """
    buffers = set(program.graph_signature.buffers)  # those that are not persistent are among the constants
    of_memory = {_memory(parameter): parameter for parameter in parameters}
    for name, constant in program.constants.items():
        if not isinstance(constant, torch.Tensor) or name in buffers:
            continue
        leaf = of_memory.get(_memory(constant), constant)
        if leaf.requires_grad and leaf.is_leaf:
            path, _, last = name.rpartition(".")
            vars(exported.get_submodule(path))[last] = leaf


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
