"""How long operators would take on a device of given speed, from their shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from partita._torch.tensors.storage import storage_key

__all__ = ["ATTENTION_EFFICIENCY", "PRODUCT_EFFICIENCY", "FixedSpeeds", "Speeds", "roofline_seconds"]

PRODUCT_EFFICIENCY = 0.85
"""What products of matrices reach of a device's arithmetic: 80 to 90 % (Dao 2023, "FlashAttention-2")."""
ATTENTION_EFFICIENCY = 0.62
"""What fused attention reaches: 50 to 73 % on an A100 (the same paper)."""

T = TypeVar("T")


class Speeds(Protocol):
    """What a roofline needs to know of a device; `partita.planning.Device` has it."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes that it reads and writes in a second."""

    def flops(self, dtype: str) -> float:
        """Its floating-point operations per second with numbers of a dtype, such as ``"bfloat16"``."""


@dataclass(frozen=True)
class FixedSpeeds:
    """A device that computes equally fast with all dtypes.

    Attributes:
        flops_per_s: floating-point operations per second.
        bytes_per_s: bytes that it reads and writes in a second.
    """

    flops_per_s: float = 100e12
    bytes_per_s: float = 1e12

    def flops(self, dtype: str) -> float:  # noqa: ARG002
        """Return `flops_per_s`, whatever the dtype."""
        return self.flops_per_s


def roofline_seconds(run: Callable[[], T], speeds: Speeds) -> tuple[T, float]:
    """Call ``run`` and add up what its operators would take: each the longer of its arithmetic and its
    memory traffic (Williams, Waterman and Patterson 2009, "Roofline").

    Arithmetic is what torch's own counter of floating-point operations knows (products of matrices,
    convolutions, attention), at the efficiency that these reach. What returns memory that it was given (a
    view) takes no time; a look-up in a table reads the rows that it returns, not the table. Neighbouring
    element-wise operators count one by one: a compiler that fuses them is faster. The operators may run on
    the meta device.

    Returns:
        What ``run`` returned, and seconds.

    >>> x = torch.empty(1000, 1000, device="meta")
    >>> round(roofline_seconds(lambda: x @ x, FixedSpeeds(1e12, 1e12))[1] * PRODUCT_EFFICIENCY, 6)
    0.002
    """
    with _Roofline(speeds) as mode:
        result = run()
    return result, mode.seconds


class _Roofline(TorchDispatchMode):
    def __init__(self, speeds: Speeds) -> None:
        super().__init__()
        self.seconds = 0.0
        self._speeds = speeds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        traffic = _traffic_bytes(func, args, kwargs, result)
        flops = _flops(func, args, kwargs, result)
        arithmetic_s = 0.0
        if flops:
            dtype = next(tensor.dtype for tensor in _tensors((args, kwargs, result)))
            arithmetic_s = flops / self._speeds.flops(str(dtype).removeprefix("torch."))
        self.seconds += max(arithmetic_s, traffic / self._speeds.bytes_per_s)
        return result


_ATEN = torch.ops.aten
_LOOK_UPS = {_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index}
_UNWRITTEN = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (1, 1, 0),
    _ATEN._scaled_dot_product_efficient_attention: (1, 1, 0),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (3, 2, 1),
    _ATEN._scaled_dot_product_efficient_attention_backward: (3, 2, 1),
}
"""What `FusedAttention` takes. Torch's counter does not know all of it, nor that causal attention needs half:
how many products of matrices have the width of the keys and how many that of the values, and which argument
has the queries; keys and values are the next."""
_GROUPED_PRODUCTS = {_ATEN._grouped_mm, _ATEN._scaled_grouped_mm}
"""What mixtures of experts compute with, and torch's counter does not know either."""


def _traffic_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func.overloadpacket
    if packet in _UNWRITTEN:
        return 0
    results = list(_tensors(result))
    if packet in _LOOK_UPS:
        return 2 * sum(map(_bytes, results))
    operands = list(_tensors((args, kwargs)))
    if not func._schema.is_mutable:
        memory = {storage_key(tensor) for tensor in operands}
        if results and memory.issuperset(map(storage_key, results)):
            return 0  # a view
    return sum(map(_bytes, operands)) + sum(map(_bytes, results))


def _bytes(tensor: torch.Tensor) -> int:
    """What a kernel reads of it: of an expanded tensor no more than there is."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    distinct = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size
    )
    return distinct * tensor.element_size()


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating-point operations, as many as would take the time of these at full speed."""
    packet = func.overloadpacket
    if packet in _ATTENTION:
        by_keys, by_values, first = _ATTENTION[packet]
        query, key, value = args[first : first + 3]
        scores = query.numel() // query.size(-1) * key.size(-2)
        computed = 2.0 * scores * (by_keys * key.size(-1) + by_values * value.size(-1))
        return computed * (0.5 if _is_causal(func, args, kwargs) else 1.0) / ATTENTION_EFFICIENCY
    if packet in _GROUPED_PRODUCTS:
        return _grouped_product_flops(args[0], args[1], result) / PRODUCT_EFFICIENCY
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    efficiency = ATTENTION_EFFICIENCY if "attention" in str(packet) else PRODUCT_EFFICIENCY
    return float(formula(*args, **kwargs, out_val=result)) / efficiency


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))


def _grouped_product_flops(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> float:
    """Of products of matrices for several experts at once. Where both operands are whole matrices, groups of
    the columns of the one meet those of the rows of the other.
    """
    if left.dim() == right.dim() == 2:
        return 2.0 * left.numel() * right.size(-1)
    return 2.0 * result.numel() * left.size(-1)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
