"""A stage's module on another device, with tensors of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partita._torch.tensors.parameters import parameter_like
from partita._torch.tensors.storage import has_memory
from partita.pipelining.interface.two_modes import graphs_in
from partita.pipelining.stages.placing.materialise import tensor_slots
from partita.pipelining.stages.placing.move_graph import move_graph, named_devices

__all__ = ["devices_of", "relocated"]


def devices_of(module: nn.Module, values: Iterable[object] = ()) -> frozenset[torch.device]:
    """The devices of a module's tensors, and of those among ``values``."""
    tensors = (tensor for _, _, _, tensor in tensor_slots(module))
    return frozenset(value.device for value in (*tensors, *values) if isinstance(value, Tensor))


def relocated(module: nn.Module, device: torch.device, homes: Iterable[torch.device]) -> nn.Module:
    """``module`` itself where all of it is on ``device``; otherwise a copy there.

    The copy has parameters, buffers and constants of its own (tied ones stay tied), and its graphs make their
    tensors on ``device``. Tensors without memory are left for ``materialise``. The module that is given, and
    the user's model, which it shares parameters with, stay where they are.

    Args:
        homes: the devices that the model was captured on: a graph names them wherever it makes a tensor.
    """
    device = _indexed(device)
    tensors: dict[int, Tensor] = {}
    for _, _, _, tensor in tensor_slots(module):
        if id(tensor) not in tensors:
            stays = tensor.device == device or not has_memory(tensor)
            tensors[id(tensor)] = tensor if stays else _moved(tensor, device)
    old = {home for home in homes if home not in (device, torch.device("meta"))}
    graphs = list(graphs_in(module))
    moves = any(id(tensor) != key for key, tensor in tensors.items())
    if not moves and not any(old & named_devices(child) for child in graphs):
        return module
    result: nn.Module = copy.deepcopy(module, dict[int, object](tensors))
    for child in graphs_in(result):
        for home in old:
            move_graph(child, home, device)
    return result


def _indexed(device: torch.device) -> torch.device:
    """The device with its index, as tensors have it; that of ``cuda`` is the current device's."""
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.empty(0, device=device).device


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    value = tensor.detach().to(device)
    return parameter_like(tensor, value) if isinstance(tensor, nn.Parameter) else value
