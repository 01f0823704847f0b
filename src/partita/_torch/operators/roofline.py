"""How long operators would take on a device of given speed, from their shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["roofline_seconds"]


def roofline_seconds(run: Callable[[], Any], flops_per_s: float, bytes_per_s: float) -> tuple[Any, float]:
    """Call ``run`` and add up what its operators would take: each the longer of its arithmetic and its
    memory traffic (Williams, Waterman and Patterson 2009, "Roofline").

    Arithmetic is what torch's own counter of floating-point operations knows (products of matrices,
    convolutions, attention); views take no time. The operators may run on the meta device.

    Returns:
        What ``run`` returned, and seconds.

    >>> x = torch.empty(1000, 1000, device="meta")
    >>> round(roofline_seconds(lambda: x @ x, 1e12, 1e12)[1], 6)
    0.002
    """
    with _Roofline(flops_per_s, bytes_per_s) as mode:
        result = run()
    return result, mode.seconds


class _Roofline(TorchDispatchMode):
    def __init__(self, flops_per_s: float, bytes_per_s: float) -> None:
        super().__init__()
        self.seconds = 0.0
        self._flops_per_s = flops_per_s
        self._bytes_per_s = bytes_per_s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False):
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
            moved = sum(tensor.nbytes for tensor in _tensors((args, kwargs, result)))
            self.seconds += max(flops / self._flops_per_s, moved / self._bytes_per_s)
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
