"""Interpolation in graphs that run operator by operator, by the kernels that eager mode runs.

A trace composes linear and cubic interpolation of gathers, products and sums, which differ from the kernel's
results in last bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

__all__ = ["interpolation_of_kernels"]

_aten = torch.ops.aten
_BY_SIZES = (
    _aten.upsample_bilinear2d.default,
    _aten.upsample_bicubic2d.default,
)
_BY_SIZES_OR_FACTORS = (
    _aten.upsample_linear1d.vec,
    _aten.upsample_bilinear2d.vec,
    _aten.upsample_trilinear3d.vec,
    _aten.upsample_bicubic2d.vec,
)
_COMPOSED: tuple[DispatchKey, ...] = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_LOCK = threading.RLock()


@contextmanager
def interpolation_of_kernels() -> Iterator[None]:
    """In this block, traces have one operator for an interpolation.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> with interpolation_of_kernels():
    ...     graph = make_fx(lambda x: torch.nn.functional.interpolate(x, size=4, mode="linear"))(
    ...         torch.ones(1, 1, 2)
    ...     )
    >>> len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.upsample_linear1d.default))
    1
    """
    keys: dict[Any, tuple[DispatchKey, ...]] = dict.fromkeys(_BY_SIZES, _COMPOSED)
    # of what sizes follow from, the rules of fake tensors are composed as well
    keys |= dict.fromkeys(_BY_SIZES_OR_FACTORS, (*_COMPOSED, DispatchKey.Meta))
    with _LOCK:
        before = {op: dict(op.py_kernels) for op in keys}
        for op, composed in keys.items():
            _replace(op, {key: kernel for key, kernel in before[op].items() if key not in composed})
        try:
            yield
        finally:
            for op, kernels in before.items():
                _replace(op, kernels)


def _replace(op: Any, kernels: dict[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
