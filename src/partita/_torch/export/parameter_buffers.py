"""Buffers that are parameters: ``self.register_buffer("scale", nn.Parameter(...))``.

They are none of ``model.parameters()``, so no optimizer trains them. ``torch.export`` goes by the type: it
registers them as parameters, and raises where one is not persistent or has two names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["parameter_buffers_as_tensors"]


@contextmanager
def parameter_buffers_as_tensors(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """In this block such a buffer of ``model`` is a tensor of the same memory. Yields what puts the model's
    own into a module that was exported here.
    """
    own = {
        (path, name): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if isinstance(buffer, nn.Parameter)
    }
    tensors: dict[nn.Parameter, Tensor] = {}
    for (path, name), buffer in own.items():
        if buffer not in tensors:
            tensors[buffer] = buffer.detach().requires_grad_(buffer.requires_grad)
        model.get_submodule(path)._buffers[name] = tensors[buffer]

    def put_into(exported: nn.Module) -> None:
        modules = dict(exported.named_modules(remove_duplicate=False))
        for (path, name), buffer in own.items():
            if path in modules and name in modules[path]._buffers:
                modules[path]._buffers[name] = buffer

    try:
        yield put_into
    finally:
        for (path, name), buffer in own.items():
            model.get_submodule(path)._buffers[name] = buffer
